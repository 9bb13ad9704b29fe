"""Settings of a pipeline: stages that run one after another and start from results of earlier stages."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from grpo_mp.utils.section import Section

STAGE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,60}", re.ASCII)
Overrides = dict[str, Any]  # values by section.key, as in overrides on a command line


class PipelineEvaluation(Section):
    """How the model that each stage ends with is scored, and the base before the first."""

    config: Path = Field(description="settings file of RL, whose data.eval and reward are read")
    settings: Overrides = Field({}, description="settings laid over the file's, as {section.key: value}")


class StageConfig(Section):
    """One stage. A text that begins with '{NAME}' is a path in the folder of the stage of that name, before it."""

    command: Literal["train", "sft", "sample"] = Field(description="what runs: grpo-mp train, sft or sample")
    config: Path = Field(description="its settings file, beside the pipeline's")
    settings: Overrides = Field({}, description="overrides of that file, as {model.path: '{cold_start}/final'}")
    rows: int | None = Field(None, gt=0, description="rows of its data, for `grpo-mp plan`; null: run.steps decides")
    evaluation: Overrides | None = Field(
        {}, description="overrides of the pipeline's evaluation for this stage; null: no evaluation"
    )


class PipelineSettings(Section):
    """A whole pipeline; `grpo-mp pipeline` runs it."""

    folder: Path = Field(description="where each stage has its folder, by its name; the table of scores, too")
    base: Path | None = Field(None, description="Hugging Face folder that is scored before the first stage; null: none")
    evaluation: PipelineEvaluation | None = Field(None, description="how models are scored; null: they are not")
    stages: dict[str, StageConfig] = Field(
        min_length=1, description="the stages by name, in the order in which they run"
    )

    @field_validator("stages")
    @classmethod
    def _check_names(cls, value: dict[str, StageConfig]) -> dict[str, StageConfig]:
        for name in value:
            if not STAGE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a stage: lower-case letters, digits, - and _")
            if name == "base":
                raise ValueError("a stage named base would be mistaken for the model before the first: rename it")
        return value
