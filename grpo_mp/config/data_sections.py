"""Settings of data sets for training and evaluation."""

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasChoices,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from grpo_mp.config.registries import DATA_SOURCES, SAMPLE_FILTERS
from grpo_mp.config.truncation import TopP
from grpo_mp.utils.section import PathText, Section

MAX_SAMPLES = 1024  # samples of a problem: the binomial coefficients of pass@k overflow float64 beyond
SourceName = Annotated[str, AfterValidator(DATA_SOURCES.check_name)]
Share = Annotated[float, Field(ge=0, le=1)]
TemplateVariables = Annotated[
    dict[str, Any],
    Field(
        validation_alias=AliasChoices("chat_template_kwargs", "apply_chat_template_kwargs"),
        description="variables of the chat template, as {enable_thinking: false} of Qwen3 (TRL chat_template_kwargs, "
        "verl and slime apply_chat_template_kwargs)",
    ),
]


class SetConfig(Section):
    """A data set."""

    path: PathText = Field(description="JSONL, JSON or Parquet file, or a `datasets` name, `name:split`")


class PromptSetConfig(SetConfig):
    """A set of prompts; null: as in `data`."""

    prompt_column: str | None = Field(None, description="column of the prompt; null: data.prompt_column")
    answer_column: str | None = Field(None, description="column of the answer; null: data.answer_column")


class EvalSetConfig(PromptSetConfig):
    """A held-out set, and how its answers are sampled; null: as in the rollout."""

    samples: int = Field(
        1, ge=1, le=MAX_SAMPLES, description="responses to each problem: avg@n, pass@k up to n and maj@n"
    )
    temperature: float | None = Field(
        None, ge=0, description="sampling temperature; 0: greedy; null: rollout.temperature"
    )
    top_p: TopP | None = Field(
        None, description="mass of nucleus sampling, or limits by name, as in the rollout; null: rollout.top_p"
    )
    max_response_tokens: int | None = Field(
        None, gt=0, description="maximum tokens of a response; null: rollout.max_response_tokens"
    )
    max_prompts: int | None = Field(None, gt=0, description="use only the first prompts, up to this number; null: all")

    @model_validator(mode="after")
    def _check_samples_can_differ(self) -> "EvalSetConfig":
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"at temperature 0 the {self.samples} samples of a problem are all the same: set samples=1"
            )
        return self


class TrainSetConfig(PromptSetConfig):
    """A set of a mixture to train on; null: as in `data`."""

    weight: float = Field(1.0, gt=0, description="share of the prompts, relative to the other sets")
    reward: dict[str, float] | None = Field(
        None, description="weights of the reward terms for this set, by name; null: those of `reward`"
    )
    pass_rates: PathText | None = Field(
        None,
        description="JSONL or Parquet file with pass rates of the prompts, such as samples.jsonl of `grpo-mp "
        "evaluate`; null: none",
    )
    pass_rate_range: tuple[Share, Share] = Field(
        (0.0, 1.0), description="[lowest, highest]: prompts with other pass rates are left out"
    )


SET_NAME = re.compile(r"\w[\w.-]{0,99}")  # the name becomes part of metric names and the name of a folder


class NamedSets(Section):
    """Sets of data by name, in fields `train` and `eval`; a path alone is a set, and one train set needs no name."""

    @field_validator("train", "eval", mode="before", check_fields=False)
    @classmethod
    def _expand_path(cls, value: Any, field: ValidationInfo) -> Any:
        if isinstance(value, str) and field.field_name == "train":
            return {"train": {"path": value}}
        if not isinstance(value, dict):
            return value
        return {name: {"path": item} if isinstance(item, str) else item for name, item in value.items()}

    @field_validator("train", "eval", check_fields=False)
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not SET_NAME.fullmatch(name):
                raise ValueError(f"the name of a set has letters, digits, '_', '-' and '.', not first: {name[:50]!r}")
        return value

    @field_serializer("train", check_fields=False)
    def _shorten(self, value: dict[str, Any]) -> Any:
        only = value.get("train")
        if only and value == {"train": type(only)(path=only.path)}:
            return only.path
        return {name: train_set.model_dump(mode="json") for name, train_set in value.items()}


class DataConfig(NamedSets):
    """Prompts to train on and to evaluate on, and their columns."""

    train: dict[str, TrainSetConfig] = Field(
        min_length=1,
        description="file (JSONL, JSON, Parquet), `datasets` name or `name:split`; or sets by name: {NAME: "
        "{path, weight, ...}}",
    )
    eval: dict[str, EvalSetConfig] = Field(
        {}, description="held-out sets by name: a file or `datasets` name, or {path, samples, ...}"
    )
    source: SourceName | None = Field(
        None,
        description="reader: jsonl, parquet, datasets, verifiers, or your own 'file.py:function'; null: by the "
        "file's suffix",
    )
    prompt_column: str = Field(
        "question",
        description="column of the prompt: text or chat messages; a dot reads inside a column: task.question",
    )
    answer_column: str | None = Field(
        "answer",
        description=r"column of the expected answer; of a text, what follows #### or the last \boxed{} counts; "
        "null: none",
    )
    system_prompt: str | None = Field(None, description="system message before every prompt; null: none")
    chat_template_kwargs: TemplateVariables = Field({})
    shuffle: bool = Field(True, description="reorder the train prompts in each epoch; false: order of the file")

    @property
    def set_weights(self) -> dict[str, dict[str, float]]:
        """Return the weights of the reward terms by train set, of the sets that have their own."""
        return {name: one.reward for name, one in self.train.items() if one.reward is not None}

    def of_set(self, own: TrainSetConfig | EvalSetConfig) -> "DataConfig":
        """Return the settings with the columns of `own`, as far as it sets them."""
        return self.model_copy(update=own.model_dump(include={"prompt_column", "answer_column"}, exclude_none=True))


class SampleConfig(Section):
    """What `grpo-mp sample` draws beyond the settings of the rollout, and which answers it keeps."""

    filters: dict[str, dict[str, Any]] = Field(
        {},
        description="filters of answers with their arguments, in order: right, best {k}, tokens {min, max}, "
        "complete (not truncated or failed), distinct, or your own 'file.py:function'; also a name "
        "or a list",
    )
    max_prompts: int | None = Field(None, gt=0, description="answer only the first prompts, up to this number")

    @field_validator("filters", mode="before")
    @classmethod
    def _filters_from_list(cls, value: Any) -> Any:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            return value
        filters: dict[str, Any] = {}
        for item in items:
            named = {item: {}} if isinstance(item, str) else item
            if not isinstance(named, dict):
                return value  # the check of the field's type rejects it
            if twice := filters.keys() & named.keys():
                raise ValueError(f"{min(map(str, twice))} is there twice: name it once")
            filters |= named
        return filters

    @field_validator("filters")
    @classmethod
    def _filters_exist(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {SAMPLE_FILTERS.check_name(name): arguments for name, arguments in value.items()}
