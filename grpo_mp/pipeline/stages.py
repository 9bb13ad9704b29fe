"""What the stages of a pipeline run, in which folders, and whether a folder is another's. Pure functions."""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mp.config import PipelineSettings
from grpo_mp.utils.errors import UserError, did_you_mean

BASE = "base"  # name of the model before the first stage
EVALUATE = "evaluate"  # folder of the scores, by stage
REFERENCE = re.compile(r"\{(\s*[^{}/\s\"',:]+\s*)\}(?=/|$)")  # not JSON in a text
STEP = r"step_[0-9]{6,}"
MODEL = re.compile(rf"final|exports/{STEP}")  # what a run makes that a model is loaded from
OF_RUN = re.compile(rf"((final|exports/{STEP})(_adapter)?|checkpoints/{STEP})(/.+)?")
OF_SAMPLE = re.compile(r"samples\.parquet|pass_rates\.jsonl|groups(/.+)?")
NAMES_OF_RUN = (
    "final",
    "final_adapter",
    "exports/step_000010",
    "exports/step_000010_adapter",
    "checkpoints/step_000010",
)
MADE = {  # what later stages may take, and how it is written
    "train": (OF_RUN, NAMES_OF_RUN),
    "sft": (OF_RUN, NAMES_OF_RUN),
    "sample": (OF_SAMPLE, ("samples.parquet", "pass_rates.jsonl", "groups")),
}
RESULTS = {"train": "final/config.json", "sft": "final/config.json", "sample": "samples.parquet", EVALUATE: "eval.json"}


@dataclass(frozen=True)
class StageJob:
    """One command of a pipeline: a stage, or the evaluation of a model.

    `needs`: names of the stages that it takes something of; `settings`: those laid over the file's.
    """

    name: str
    command: str
    config: Path
    folder: Path
    settings: Mapping[str, Any]
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    stage: str = ""  # of an evaluation, whose model it scores

    @property
    def result(self) -> Path:
        """Return the file that is there when the job is done."""
        return self.folder / RESULTS[self.command]

    @property
    def model(self) -> Path | None:
        """Return the model that is named by an option; None: that of the settings."""
        return Path(self.options[self.options.index("--model") + 1]) if "--model" in self.options else None

    @property
    def overrides(self) -> list[str]:
        """Return the settings as arguments of a command line."""
        return [f"{name}={json.dumps(value)}" for name, value in self.settings.items()]

    def arguments(self, ranks: int | None) -> list[str]:
        """Return the arguments of grpo-mp."""
        size = ["--ranks", str(ranks)] if ranks else []
        return [self.command, str(self.config), *size, *self.options, *self.overrides]


@dataclass(frozen=True)
class Record:
    """What is known of a job that was begun: a digest of all that its settings file and stage say, and its settings.

    `inputs`: digests of the data, code and model that it read, by path, when it was begun.
    """

    digest: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    seconds: float = 0.0
    inputs: Mapping[str, str] = field(default_factory=dict)


def make_jobs(settings: PipelineSettings, file: Path) -> list[StageJob]:
    """Return the jobs of a pipeline in the order in which they run; `file`: where it was read.

    Raises UserError for a stage that takes what no stage before it makes.
    """
    jobs, former = list[StageJob](), dict[str, StageJob]()
    if settings.base and settings.evaluation:
        jobs.append(_evaluation(settings, file, BASE, settings.base, {}, former))
    for name, stage in settings.stages.items():
        where, folder = f"{file}: stages.{name}", settings.folder / name
        found, needs = _resolve(dict(stage.settings), former, where, tuple(settings.stages))
        reserved = {"run.folder"} & found.keys()
        if reserved:
            raise UserError(f"{where}: run.folder is the stage's, {folder}: leave it out")
        is_run = stage.command != "sample"
        found |= {"run.folder": str(folder)} if is_run else {}
        options = () if is_run else ("--out", str(folder))
        former[name] = StageJob(name, stage.command, file.parent / stage.config, folder, found, options, needs)
        jobs.append(former[name])
        if settings.evaluation and is_run and stage.evaluation is not None:
            jobs.append(_evaluation(settings, file, name, folder / "final", stage.evaluation, former))
    return jobs


def _evaluation(
    settings: PipelineSettings,
    file: Path,
    name: str,
    model: Path,
    more: Mapping[str, Any],
    former: Mapping[str, StageJob],
) -> StageJob:
    assert settings.evaluation
    folder = settings.folder / EVALUATE / name
    given = {**settings.evaluation.settings, **more}
    resolved, taken = _resolve(given, former, f"{file}: evaluation of {name}", tuple(settings.stages))
    found = {"run.folder": str(settings.folder / EVALUATE), **resolved}
    options = ("--model", str(model), "--out", str(folder))
    needs = tuple(dict.fromkeys([*([] if name == BASE else [name]), *taken]))
    config = file.parent / settings.evaluation.config
    return StageJob(f"{EVALUATE} {name}", EVALUATE, config, folder, found, options, needs, name)


def _resolve(
    value: Any, former: Mapping[str, StageJob], where: str, stages: Sequence[str]
) -> tuple[Any, tuple[str, ...]]:
    """Return a value with the folders of the stages that its texts begin with, and the names of those.

    `former`: the stages before it; `stages`: all there are. Raises UserError for one that no stage before it is, for
    what that stage does not make, and where a stage is named elsewhere in a text.
    """
    needs: dict[str, None] = {}

    def resolve(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: resolve(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [resolve(inner, path) for inner in value]
        if not isinstance(value, str):
            return value
        stage, rest = _reference(value, former, f"{where}: {path} takes {value}", stages)
        if stage is None:
            return value
        needs[stage.name] = None
        return str(stage.folder / rest)

    return resolve(value, ""), tuple(needs)


def _reference(
    text: str, former: Mapping[str, StageJob], takes: str, stages: Sequence[str]
) -> tuple[StageJob | None, str]:
    """Return the stage that a text begins with, and what it takes of it; None and nothing of one that takes none.

    Raises UserError, which begins with `takes`, as `_resolve` does.
    """
    match = REFERENCE.match(text)
    rest = text[match.end() if match else 0 :]
    if inside := next((name for name in stages if re.search(rf"\{{\s*{re.escape(name)}\s*\}}", rest)), None):
        raise UserError(
            f"{takes}, in which {{{inside}}} stands for no folder: a path begins with it, as {{{inside}}}/final"
        )
    if not match:
        return None, ""
    name = match[1].strip()
    if name not in former:
        known = f"those are {', '.join(former)}" if former else "it is the first"
        raise UserError(f"{takes}, and no stage before it is {name}{did_you_mean(name, former)}: {known}")
    if name != match[1]:
        raise UserError(f"{takes}, where the name of stage {name} has blanks: write {{{name}}}{rest}")
    stage, rest = former[name], rest.strip("/")
    made, names = MADE[stage.command]
    if not made.fullmatch(rest) or ".." in rest.split("/"):
        nearest = difflib.get_close_matches(rest, names, n=1, cutoff=0.0)[0] if rest else names[0]
        raise UserError(
            f"{takes}, which stage {name} ({stage.command}) does not make (did you mean {{{name}}}/{nearest}?): it "
            f"makes {', '.join(names)}"
        )
    return stage, rest


def digests(jobs: Sequence[StageJob], texts: Mapping[Path, str]) -> dict[str, str]:
    """Return by job a digest of all that decides what it makes: its command, settings, file, and stages before it.

    `texts`: the content of the settings files.
    """
    found: dict[str, str] = {}
    for job in jobs:
        facts = [
            *(job.command, job.options, sorted(job.settings.items()), texts[job.config]),
            [found[name] for name in job.needs],
        ]
        found[job.name] = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
    return found


def present_records(jobs: Sequence[StageJob], records: Mapping[str, Record]) -> dict[str, Record]:
    """Return the records of jobs whose folders are there: what was removed is to be done anew.

    Raises UserError where something is left that was made of what was removed.
    """
    present = {job.name: records[job.name] for job in jobs if job.name in records and job.folder.exists()}
    gone, left = dict[str, Path](), list[Path]()
    for job in jobs:
        if job.name in present and not gone.keys().isdisjoint(job.needs):
            left.append(job.folder)
        if job.name in records and (job.name not in present or job.folder in left):
            gone[job.name] = job.folder
    if left:
        removed = next(folder for folder in gone.values() if folder not in left)
        raise UserError(
            f"{removed} was removed, and {', '.join(map(str, left))} follows from it: remove "
            f"{'them' if len(left) > 1 else 'it'}, too, or take another folder"
        )
    return present


def check_records(jobs: Sequence[StageJob], known: Mapping[str, str], records: Mapping[str, Record]) -> None:
    """Raise UserError where a job was begun with other settings than those that it has now."""
    for job in jobs:
        record = records.get(job.name)
        if record and record.digest != known[job.name]:
            state = "done" if record.done else "begun"
            raise UserError(
                f"stage {job.name} was {state} with {_difference(record.settings, job)}: take these, or another "
                f"folder, or remove {job.folder} and what follows from it"
            )


def check_inputs(job: StageJob, record: Record, now: Mapping[str, str]) -> None:
    """Raise UserError where a job was begun with other files than those that are there now; what is gone may be."""
    before = record.inputs
    if changed := next((path for path in before if path in now and before[path] != now[path]), None):
        raise UserError(
            f"stage {job.name} was {'done' if record.done else 'begun'} with another {changed}: put that back, or take "
            f"another folder, or remove {job.folder} and what follows from it"
        )


def _difference(before: Mapping[str, Any], job: StageJob) -> str:
    now = dict(job.settings)
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not changed:
        return f"another {job.config}, or after another stage"
    name = changed[0]
    return f"{name}={json.dumps(before[name])}" if name in before else f"no {name}"
