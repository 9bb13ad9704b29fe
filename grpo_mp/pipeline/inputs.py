"""What each stage takes: models, data, code; whether it is there, or will be made by a stage before. Without torch."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_mp.config import Settings, SftSettings, load_settings, load_sft_settings
from grpo_mp.config.registries import DATA_SOURCES
from grpo_mp.data.rows import SOURCE_BY_SUFFIX, source_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.pipeline.stages import EVALUATE, MODEL, OF_RUN, StageJob
from grpo_mp.utils.errors import UserError

POLICY, CRITIC, TEACHER = "model.path", "critic.path", "algorithm.distillation.teacher.folder"
UNREAD: Mapping[str, dict[str, Any]] = {  # settings that a command does not read, or takes from its options
    EVALUATE: {"data": {"train"}, "model": {"path"}},
    "sample": {"data": {"eval"}},
}
CODE = re.compile(r"(.+\.py):\w+")
LOCAL = ("/", "./", "../", "~")  # how names begin that mean no data set of the hub


@dataclass(frozen=True)
class DataFile:
    """A set of data, or its pass rates. `setting`: that names it; `source`: what reads it, None: by its suffix."""

    setting: str
    path: str
    source: str | None

    @property
    def reader(self) -> str:
        """Return the name of what reads it."""
        return self.source or source_of(self.path)


@dataclass(frozen=True)
class StageInputs:
    """What a job takes. `models`: their configs by setting; `waits`: a stage before it has yet to make some of it."""

    job: StageJob
    settings: Settings | SftSettings
    models: Mapping[str, HfConfig]
    data: tuple[DataFile, ...]
    waits: bool


def load_job_settings(job: StageJob) -> Settings | SftSettings:
    """Return the settings that a job runs with. Raises UserError."""
    if job.command == "sft":
        return load_sft_settings(job.config, job.overrides)
    return load_settings(job.config, job.overrides, trains=job.command == "train")


def read_tree(job: StageJob, settings: Settings | SftSettings, unread: Mapping[str, Any] | None = None) -> Any:
    """Return the nested settings that a job reads, without those that are `unread`, too."""
    return settings.model_dump(mode="json", exclude={**(unread or {}), **UNREAD.get(job.command, {})})


def texts_in(tree: Any) -> Iterator[str]:
    """Yield every text of nested settings; names are none."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from texts_in(part)


def find_maker(path: str | Path, jobs: Sequence[StageJob]) -> tuple[StageJob, str] | None:
    """Return the job in whose folder a path is, and the path in there; None of a path that is in none."""
    absolute = Path(os.path.abspath(path))
    for job in jobs:
        folder = Path(os.path.abspath(job.folder))
        if absolute.is_relative_to(folder):
            return job, absolute.relative_to(folder).as_posix()
    return None


def check_made(job: StageJob, former: Sequence[StageJob], settings: Mapping[str, Settings | SftSettings]) -> None:
    """Raise UserError where a job takes what no stage makes by its settings, which are by stage.

    `former`: the stages before it.
    """
    for text in texts_in(dict(job.settings)):
        if (found := find_maker(text, former)) and (problem := _not_made(*found, settings[found[0].name])):
            raise UserError(f"{text}: stage {found[0].name} {problem}")


def _not_made(stage: StageJob, rest: str, settings: Settings | SftSettings) -> str:
    """Return why a run with these settings does not make what is in its folder by this name, or ""."""
    match, run = OF_RUN.fullmatch(rest), settings.run
    if stage.command not in ("train", "sft") or not match:
        return ""
    if match[3] and not settings.model.lora:
        return "makes no adapters: set its model.lora, or take the model beside them"
    if match[1].startswith("exports/"):
        step, every = int(match[2].rpartition("_")[2]), run.export_every
        if not every:
            return "makes no exports while it goes on: set its run.export_every, or take final"
        if step % every or not step or step > (run.steps or step):
            last = f" up to {run.steps}" if run.steps else ""
            return f"makes exports of every {every} steps{last}, not of step {step}: take one of those, or final"
    return ""


def model_folders(command: str, settings: Settings | SftSettings, model: Path | None = None) -> dict[str, Path]:
    """Return the folders of the models that a command reads, by setting; `model`: of an option, for the policy."""
    found = {POLICY: model or settings.model.path}
    if command == EVALUATE or not isinstance(settings, Settings):
        return found
    found |= {f"reward.{name}.folder": one.folder for name, one in settings.reward.own_models.items() if one.folder}
    if command == "train":
        distillation = settings.algorithm.distillation
        found |= {CRITIC: settings.critic.path} if settings.critic and settings.critic.path else {}
        found |= {TEACHER: distillation.teacher.folder} if distillation and distillation.teacher.folder else {}
    return found


def data_files(command: str, settings: Settings | SftSettings) -> Iterator[DataFile]:
    """Yield the sets of data that a command reads, and files of pass rates."""
    data = settings.data
    for name, one in data.train.items() if command != EVALUATE else ():
        setting = "data.train" if len(data.train) == 1 else f"data.train.{name}.path"
        yield DataFile(setting, one.path, one.source or data.source)
        if rates := getattr(one, "pass_rates", None):
            yield DataFile(f"data.train.{name}.pass_rates", rates, None)
    for name, held_out in data.eval.items() if command != "sample" else ():
        yield DataFile(f"data.eval.{name}.path", held_out.path, held_out.source or data.source)


def read_inputs(jobs: Sequence[StageJob], done: Collection[str]) -> list[StageInputs]:
    """Return what each job takes that is not `done`; what is not made by a job before it is there.

    Raises UserError, with the stage's name, for a model, a data file or a file of code that is not there, and for one
    of another kind than it should be.
    """
    found, coming = list[StageInputs](), dict[str, HfConfig]()
    for number, job in enumerate(jobs):
        if job.name in done:
            continue
        try:
            found.append(_inputs_of(job, jobs[:number], coming))
        except UserError as error:
            raise UserError(f"stage {job.name}: {error}") from error
        coming[job.name] = found[-1].models[POLICY]
    return found


def _inputs_of(job: StageJob, former: Sequence[StageJob], coming: Mapping[str, HfConfig]) -> StageInputs:
    """Return what a job takes; `coming`: the models with which those of the `former` begin that are not done."""
    settings, to_do = load_job_settings(job), [one for one in former if one.name in coming]
    models = {
        setting: _read_model(setting, path, settings, former, coming)
        for setting, path in model_folders(job.command, settings, job.model).items()
    }
    data = tuple(data_files(job.command, settings))
    for file in data:
        _check_data(file, former, to_do)
    tree = read_tree(job, settings)
    for text in _names_and_texts(tree):
        if (code := CODE.fullmatch(text)) and not find_maker(text, to_do) and not os.path.exists(code[1]):
            raise UserError(f"{text}: no such file: {code[1]}")
    waits = any(find_maker(text, to_do) for text in (*texts_in(tree), *job.options))
    return StageInputs(job, settings, models, data, waits)


def _read_model(
    setting: str,
    path: Path,
    settings: Settings | SftSettings,
    former: Sequence[StageJob],
    coming: Mapping[str, HfConfig],
) -> HfConfig:
    """Return the config of a model, or of that with which the stage begins that will make it. Raises UserError."""
    maker = find_maker(path, former)
    if maker and (maker[0].command not in ("train", "sft") or not MODEL.fullmatch(maker[1])):
        stage = maker[0]
        names = "final, and exports/step_N with run.export_every" if stage.command in ("train", "sft") else "none"
        raise UserError(f"{setting}={path} is no model: stage {stage.name} ({stage.command}) makes {names}")
    known = coming.get(maker[0].name) if maker else None
    if known and setting.startswith("reward."):
        raise UserError(f"{setting}={path} is a model without a reward head: no stage makes a reward model")
    if known:
        hf = known
    else:
        try:
            hf = HfConfig.read(path)
        except UserError as error:
            raise UserError(f"{setting}={path}: {error}") from error
    if setting == POLICY:
        return replace(hf, family=settings.model.family, trains_mtp=settings.model.trains_mtp)
    if setting == CRITIC and isinstance(settings, Settings):
        return replace(hf, family=settings.for_critic().model.family)
    return hf


def _check_data(file: DataFile, former: Sequence[StageJob], to_do: Sequence[StageJob]) -> None:
    """Raise UserError for a file that is not there, and no stage makes; a user's own source reads what it will."""
    if file.reader not in DATA_SOURCES.built_in:
        return
    if maker := find_maker(file.path, former):
        stage, rest = maker
        if OF_RUN.fullmatch(rest) or rest.startswith("groups"):
            makes = "samples.parquet and pass_rates.jsonl" if stage.command == "sample" else "none"
            raise UserError(
                f"{file.setting}={file.path} is no data: stage {stage.name} ({stage.command}) makes {makes}"
            )
        if stage in to_do:  # a sampling's, or samples.jsonl of an evaluation, which names no reference
            return
    reads_file = file.reader in SOURCE_BY_SUFFIX.values()
    name = file.path if reads_file else file.path.partition(":")[0]
    if (reads_file or (file.reader == "datasets" and name.startswith(LOCAL))) and not os.path.exists(name):
        raise UserError(f"{name}: no such file: set {file.setting} to an existing one")


def _names_and_texts(tree: Any) -> Iterator[str]:
    """Yield every text of nested settings, and every name that the user chose."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for part in [*tree.keys(), *tree.values()] if isinstance(tree, dict) else tree:
            yield from _names_and_texts(part)
