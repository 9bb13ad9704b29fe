"""Steps as transactions on disk: a checkpoint counts once its manifest, written last, is there."""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.manifest import HASH, Checksums, Files, checksums_of
from grpo_mp.errors import UserError

MANIFEST = "manifest.json"
SETTINGS = "settings.yaml"
FINAL = "final"  # the exported Hugging Face folder
STEP = re.compile(r"step_([0-9]{6,})")  # other names are copies that users made
WRITTEN_BY = re.compile(r"__([0-9]+)_[0-9]+\.distcp")  # Megatron's files of tensors name the rank that wrote them


@dataclass(frozen=True)
class TrainState:
    """Where a run stands between two steps."""

    step: int = 0  # steps done
    optimizer_step: int = 0
    samples_seen: int = 0
    weight_version: int = 0
    cursor: dict[str, Any] | None = None  # of the train prompts
    groups_launched: int = 0
    solve_streak: dict[str, int] = field(default_factory=dict)  # by prompt index
    resting: dict[str, int] = field(default_factory=dict)  # prompt index -> step after which it is taken again
    controls: dict[str, float] = field(default_factory=dict)  # what adaptive weights have come to
    reference_refreshed: bool = False  # the checkpoint holds a reference of its own


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step_{step:06d}"


def own_checksums(folder: Path, rank: int = 0, size: int = 1) -> Files:
    """Size and checksum of the files that this of `size` ranks wrote; the first rank has those that name none.

    A rank reads what it has just written, while its machine still holds it in memory.
    """
    owners = {file: WRITTEN_BY.fullmatch(file.name) for file in _files(folder) if not file.name.startswith(MANIFEST)}
    return checksums_of(folder, [file for file, by in owners.items() if (int(by[1]) % size if by else 0) == rank])


def write_manifest(folder: Path, state: TrainState, files: Files | None = None) -> None:
    """Declare the checkpoint whole: the state, and size and checksum of every file, which must be on disk already.

    `files`: what `own_checksums` of all ranks found (default: found here).
    """
    temporary = folder / (MANIFEST + ".incomplete")
    held = own_checksums(folder) if files is None else files
    with temporary.open("w") as file:
        json.dump({"state": asdict(state), "files": dict(sorted(held.items()))}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST)


def read_manifest(folder: Path) -> TrainState:
    """The state of a whole checkpoint.

    Raises UserError for a manifest that this version did not write, and where a file it names is missing or cut.
    """
    state, files = _read(folder)
    torn = next((name for name, held in files.items() if not _has_size(folder / name, held["bytes"])), None)
    if torn:
        raise UserError(
            f"{folder}: the checkpoint is torn, {torn} is missing or cut short: copy it again{_or_else(folder)}"
        )
    return state


def checkpoint_checksums(folder: Path) -> Checksums:
    """What compares a whole checkpoint's files with their checksums. Raises UserError as `read_manifest`."""
    return Checksums(folder, _read(folder)[1], _or_else(folder))


def latest_checkpoint(run_folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    whole = _whole_checkpoints(run_folder)
    return whole[-1] if whole else None


def begin_checkpoint(folder: Path) -> None:
    """An empty folder to save into; what a killed save left there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def prune_checkpoints(run_folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints, manifest first."""
    for folder in _whole_checkpoints(run_folder)[:-keep]:
        (folder / MANIFEST).unlink()
        shutil.rmtree(folder)


def check_run_folder(run_folder: Path, resolved: str, resume: bool) -> None:
    """Refuse a folder that cannot be this run's. `resolved`: the run's settings as YAML. Nothing is written.

    Raises UserError: not a folder or not writable, results of other settings in it, results without `resume`, or a
    torn checkpoint to resume from. What a start left that never made a step is no obstacle.
    """
    existing = next(path for path in (run_folder, *run_folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"{run_folder}: {existing} is not a folder that can be written to: choose another run.folder")
    checkpoint = latest_checkpoint(run_folder)
    file = run_folder / SETTINGS
    if checkpoint is None and not (run_folder / "metrics.jsonl").exists():
        return
    changed = _difference(file.read_text(), resolved) if file.exists() else f"it has no {SETTINGS}"
    if changed:
        raise UserError(
            f"{run_folder} holds a run of other settings ({changed}): choose another run.folder, or move it away"
        )
    if checkpoint and not resume:
        raise UserError(f"{run_folder} holds checkpoints of this run: set run.resume=auto to go on, or move it away")
    if checkpoint:
        read_manifest(checkpoint)


def claim_run_folder(run_folder: Path, resolved: str) -> None:
    """Write the resolved settings into the folder, which `check_run_folder` has passed."""
    run_folder.mkdir(parents=True, exist_ok=True)
    temporary = run_folder / (SETTINGS + ".incomplete")
    temporary.write_text(resolved)
    temporary.rename(run_folder / SETTINGS)


def _difference(old: str, new: str) -> str:
    """The first line in which two resolved files differ, without settings that may change between attempts."""
    free = ("steps:", "save_every:", "eval_every:", "resume:", "keep_checkpoints:", "export:")
    olds, news = ([line for line in text.splitlines() if not line.strip().startswith(free)] for text in (old, new))
    for was, now in zip(olds, news, strict=False):
        if was != now:
            return f"{was.strip()} there, {now.strip()} here"
    return "" if len(olds) == len(news) else "one has more settings"


def _whole_checkpoints(run_folder: Path) -> list[Path]:
    """Those that a run saved, oldest first. What users copied or renamed is theirs: neither chosen nor removed."""
    steps = {path: STEP.fullmatch(path.name) for path in (run_folder / "checkpoints").glob("step_*")}
    numbers = {path: int(step[1]) for path, step in steps.items() if step and (path / MANIFEST).is_file()}
    own = [path for path, number in numbers.items() if path == checkpoint_folder(run_folder, number)]
    return sorted(own, key=lambda path: numbers[path])


def _read(folder: Path) -> tuple[TrainState, Files]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        state = TrainState(**manifest["state"])
        files = {
            str(name): {"bytes": int(held["bytes"]), HASH: str(held[HASH])} for name, held in manifest["files"].items()
        }
        if not isinstance(state.step, int) or state.step < 0:
            raise ValueError(f"step {state.step!r}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{folder / MANIFEST}: not a checkpoint manifest ({error!r}): copy it again{_or_else(folder)}"
        ) from error
    return state, files


def _or_else(folder: Path) -> str:
    return f", or rename {folder.name} to go on from the checkpoint before it"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
