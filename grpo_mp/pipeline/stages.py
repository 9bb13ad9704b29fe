"""The jobs of a pipeline: commands and settings of its stages, and the check of the settings."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mp.config import PipelineSettings, Settings, SftSettings, load_settings, load_sft_settings
from grpo_mp.utils.errors import UserError, did_you_mean

BASE = "base"  # name of the model before the first stage
EVALUATE = "evaluate"  # command of an evaluation, and folder of the scores of all stages
REFERENCE = re.compile(r"\{\s*([^{}/\s\"',:]+)\s*\}(?=/|$)/?")  # '{NAME}/' or '{NAME}'; JSON does not match
TRAINED = re.compile(r"(final|exports/step_\d{6,}|checkpoints/step_\d{6,}).*")
# Files and folders of a stage that later stages may use.
MADE = {"train": TRAINED, "sft": TRAINED, "sample": re.compile(r"samples\.parquet|pass_rates\.jsonl|groups")}
RESULTS = {"train": "final/config.json", "sft": "final/config.json", "sample": "samples.parquet", EVALUATE: "eval.json"}


@dataclass(frozen=True)
class StageJob:
    """A command of a pipeline: a stage, or the evaluation of `stage`'s model. `settings`: overrides of `config`."""

    name: str
    command: str
    config: Path
    folder: Path
    settings: Mapping[str, Any]
    options: tuple[str, ...] = ()
    stage: str = ""

    @property
    def result(self) -> Path:
        """Return the path of the file that exists when the job is done."""
        return self.folder / RESULTS[self.command]

    @property
    def overrides(self) -> list[str]:
        return [f"{name}={json.dumps(value)}" for name, value in self.settings.items()]

    def arguments(self, ranks: int | None) -> list[str]:
        size = ["--ranks", str(ranks)] if ranks else []
        return [self.command, str(self.config), *size, *self.options, *self.overrides]


def make_jobs(settings: PipelineSettings, file: Path) -> list[StageJob]:
    """Return the jobs of a pipeline in order of execution. `file`: settings file, for relative paths and messages."""
    jobs = list[StageJob]()
    former = dict[str, StageJob]()

    def evaluate(name: str, model: Path, changes: Mapping[str, Any]) -> StageJob:
        assert settings.evaluation
        folder = settings.folder / EVALUATE / name
        given = {"run.folder": str(settings.folder / EVALUATE), **settings.evaluation.settings, **changes}
        found = _resolve(given, former, f"{file}: evaluation of {name}")
        options = ("--model", str(model), "--out", str(folder))
        config = file.parent / settings.evaluation.config
        return StageJob(f"{EVALUATE} {name}", EVALUATE, config, folder, settings=found, options=options, stage=name)

    if settings.base and settings.evaluation:
        jobs.append(evaluate(BASE, settings.base, {}))
    for name, stage in settings.stages.items():
        where = f"{file}: stages.{name}"
        folder = settings.folder / name
        found = _resolve(dict(stage.settings), former, where)
        if "run.folder" in found:
            raise UserError(f"{where}: run.folder is the stage's, {folder}: leave it out")
        is_run = stage.command != "sample"
        found |= {"run.folder": str(folder)} if is_run else {}
        options = () if is_run else ("--out", str(folder))
        job = StageJob(name, stage.command, file.parent / stage.config, folder, settings=found, options=options)
        former[name] = job
        jobs.append(job)
        if settings.evaluation and is_run and stage.evaluation is not None:
            jobs.append(evaluate(name, folder / "final", stage.evaluation))
    return jobs


def _resolve(value: Any, former: Mapping[str, StageJob], where: str) -> Any:
    """Replace '{NAME}' at the start of every text in `value` by the folder of the earlier stage NAME."""
    if isinstance(value, dict):
        return {key: _resolve(inner, former, f"{where}: {key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, former, where) for inner in value]
    match = REFERENCE.match(value) if isinstance(value, str) else None
    if not match:
        return value
    name = match[1]
    rest = value[match.end() :]
    if name not in former:
        raise UserError(f"{where} takes {value}, and no stage before it is {name}{did_you_mean(name, former)}")
    job = former[name]
    if not MADE[job.command].fullmatch(rest) or ".." in rest.split("/"):
        raise UserError(f"{where} takes {value}, which stage {name} ({job.command}) does not make")
    return str(job.folder / rest)


def load_job_settings(job: StageJob) -> Settings | SftSettings:
    """Return the settings of a job: those of its file with the job's overrides."""
    if job.command == "sft":
        return load_sft_settings(job.config, job.overrides)
    return load_settings(job.config, job.overrides, trains=job.command == "train")


def check_jobs(jobs: Sequence[StageJob], pipeline_folder: Path) -> None:
    """Check settings and model of each job in advance; each command checks the rest when it starts."""
    for job in jobs:
        try:
            settings = load_job_settings(job)
            if job.command in ("train", "sft") and not settings.run.export:
                raise UserError("run.export=false leaves no model for the next stage: leave it out")
            model = settings.model.path
            is_made = job.command == EVALUATE or model.is_relative_to(pipeline_folder)
            if not is_made and not (model / "config.json").is_file():
                raise UserError(f"model.path={model}: {model / 'config.json'} does not exist: download the model")
        except UserError as error:
            raise UserError(f"stage {job.name}: {error}") from error
