"""The commands that the stages of a pipeline run, and the check that each finds its models and data."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mp.config import PipelineSettings, Settings, SftSettings, load_settings, load_sft_settings
from grpo_mp.data.rows import SOURCE_BY_SUFFIX, source_of
from grpo_mp.utils.errors import UserError, did_you_mean

BASE = "base"  # name of the model before the first stage
EVALUATE = "evaluate"  # folder of the scores, by stage
REFERENCE = re.compile(r"\{\s*([^{}/\s\"',:]+)\s*\}(?=/|$)/?")  # not JSON in a text
MODEL = re.compile(r"(final|exports/step_[0-9]{6,})/?")  # what a run makes that a model is loaded from
MADE = {  # what later stages may take
    **dict.fromkeys(("train", "sft"), re.compile(r"(final|exports/step_\d{6,}|checkpoints/step_\d{6,}).*")),
    "sample": re.compile(r"samples\.parquet|pass_rates\.jsonl|groups"),
}
EXAMPLES = {
    **dict.fromkeys(("train", "sft"), "final, exports/step_000010"),
    "sample": "samples.parquet, pass_rates.jsonl",
}
RESULTS = {"train": "final/config.json", "sft": "final/config.json", "sample": "samples.parquet", EVALUATE: "eval.json"}


@dataclass(frozen=True)
class StageJob:
    """One command of a pipeline: a stage, or the evaluation of the model of `stage`; `settings` override the file's."""

    name: str
    command: str
    config: Path
    folder: Path
    settings: Mapping[str, Any]
    options: tuple[str, ...] = ()
    stage: str = ""

    @property
    def result(self) -> Path:
        """Return the file that exists when the job is done."""
        return self.folder / RESULTS[self.command]

    @property
    def overrides(self) -> list[str]:
        """Return the settings as arguments of a command line."""
        return [f"{name}={json.dumps(value)}" for name, value in self.settings.items()]

    def arguments(self, ranks: int | None) -> list[str]:
        """Return the arguments of grpo-mp."""
        size = ["--ranks", str(ranks)] if ranks else []
        return [self.command, str(self.config), *size, *self.options, *self.overrides]


def make_jobs(settings: PipelineSettings, file: Path) -> list[StageJob]:
    """Return the jobs of a pipeline, read from `file`, in the order in which they run."""
    jobs, former = list[StageJob](), dict[str, StageJob]()
    if settings.base and settings.evaluation:
        jobs.append(_evaluation(settings, file, name=BASE, model=settings.base, changes={}, former=former))
    for name, stage in settings.stages.items():
        where, folder = f"{file}: stages.{name}", settings.folder / name
        found = _resolve(dict(stage.settings), former, where)
        if "run.folder" in found:
            raise UserError(f"{where}: run.folder is the stage's, {folder}: leave it out")
        is_run = stage.command != "sample"
        found |= {"run.folder": str(folder)} if is_run else {}
        options = () if is_run else ("--out", str(folder))
        former[name] = StageJob(
            name, stage.command, config=file.parent / stage.config, folder=folder, settings=found, options=options
        )
        jobs.append(former[name])
        if settings.evaluation and is_run and stage.evaluation is not None:
            jobs.append(
                _evaluation(settings, file, name=name, model=folder / "final", changes=stage.evaluation, former=former)
            )
    return jobs


def _evaluation(
    settings: PipelineSettings,
    file: Path,
    name: str,
    model: Path,
    changes: Mapping[str, Any],
    *,
    former: Mapping[str, StageJob],
) -> StageJob:
    assert settings.evaluation
    folder = settings.folder / EVALUATE / name
    given = {"run.folder": str(settings.folder / EVALUATE), **settings.evaluation.settings, **changes}
    found = _resolve(given, former, f"{file}: evaluation of {name}")
    options = ("--model", str(model), "--out", str(folder))
    config = file.parent / settings.evaluation.config
    return StageJob(
        f"{EVALUATE} {name}", EVALUATE, config=config, folder=folder, settings=found, options=options, stage=name
    )


def _resolve(value: Any, former: Mapping[str, StageJob], where: str) -> Any:
    """Replace '{NAME}' at the beginning of every text by the folder of that stage, one of the `former`."""
    if isinstance(value, dict):
        return {key: _resolve(inner, former, f"{where}: {key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, former, where) for inner in value]
    match = REFERENCE.match(value) if isinstance(value, str) else None
    if not match:
        return value
    name, rest = match[1], value[match.end() :]
    if name not in former:
        known = f"those are {', '.join(former)}" if former else "it is the first"
        raise UserError(f"{where} takes {value}, and no stage before it is {name}{did_you_mean(name, former)}: {known}")
    command = former[name].command
    if not MADE[command].fullmatch(rest) or ".." in rest.split("/"):
        raise UserError(
            f"{where} takes {value}, which stage {name} ({command}) does not make: it makes {EXAMPLES[command]}"
        )
    return str(former[name].folder / rest)


def load_job_settings(job: StageJob) -> Settings | SftSettings:
    """Return the settings that a job runs with."""
    if job.command == "sft":
        return load_sft_settings(job.config, job.overrides)
    return load_settings(job.config, job.overrides, trains=job.command == "train")


def find_maker(path: str | Path, jobs: Sequence[StageJob]) -> tuple[StageJob, str] | None:
    """Return the job in whose folder a path is, and the path in there; None of a path that is in none."""
    absolute = Path(os.path.abspath(path))
    for job in jobs:
        folder = Path(os.path.abspath(job.folder))
        if absolute.is_relative_to(folder):
            return job, absolute.relative_to(folder).as_posix()
    return None


def model_folders(job: StageJob, settings: Settings | SftSettings) -> dict[str, Path]:
    """Return the folders of the models that a job reads, by setting."""
    if job.command == EVALUATE:
        return {"model.path": Path(job.options[1])}
    found = {"model.path": settings.model.path}
    if job.command == "train" and isinstance(settings, Settings):
        distillation = settings.algorithm.distillation
        found |= {"critic.path": settings.critic.path} if settings.critic and settings.critic.path else {}
        if distillation and distillation.teacher.folder:
            found["algorithm.distillation.teacher.folder"] = distillation.teacher.folder
    return found


def check_jobs(jobs: Sequence[StageJob]) -> None:
    """Raise UserError, which names the stage, for wrong settings, or models and data that are neither there nor made.

    The rest of a stage's checks, which may take what former stages make, is its own command's.
    """
    for number, job in enumerate(jobs):
        try:
            settings = load_job_settings(job)
            if job.command in ("train", "sft") and not settings.run.export:
                raise UserError("run.export=false leaves no model for the next stage: leave it out")
            for setting, folder in model_folders(job, settings).items():
                _check_model(setting, folder, jobs[:number])
            for setting, path in _data_files(job, settings):
                if not (find_maker(path, jobs[:number]) or os.path.exists(path)):
                    raise UserError(f"{path}: no such file: set {setting} to an existing one")
        except UserError as error:
            raise UserError(f"stage {job.name}: {error}") from error


def _check_model(setting: str, folder: Path, former: Sequence[StageJob]) -> None:
    if maker := find_maker(folder, former):
        stage, rest = maker
        if stage.command not in ("train", "sft") or not MODEL.fullmatch(rest):
            raise UserError(f"{setting}={folder} is no model: stage {stage.name} ({stage.command}) makes none there")
    elif not (folder / "config.json").is_file():
        raise UserError(f"{setting}={folder}: {folder / 'config.json'} does not exist: download the model")


def _data_files(job: StageJob, settings: Settings | SftSettings) -> Iterator[tuple[str, str]]:
    """Yield setting and path of the data files that a job reads; other sources are checked when it starts."""
    data = settings.data
    train = data.train if job.command != EVALUATE else {}
    evals = data.eval if job.command != "sample" else {}
    for setting, one in (
        *((f"data.train.{name}.path", one) for name, one in train.items()),
        *((f"data.eval.{name}.path", one) for name, one in evals.items()),
    ):
        if (one.source or data.source or source_of(one.path)) in SOURCE_BY_SUFFIX.values():
            yield setting, one.path
