"""Steps as transactions on disk: a checkpoint counts once its manifest, written last, is there."""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_mp.errors import UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class RunState:
    """Where a run stands between two steps."""

    step: int = 0  # steps done
    optimizer_step: int = 0
    samples_seen: int = 0
    weight_version: int = 0
    cursor: dict[str, Any] | None = None  # of the train prompts


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step_{step:06d}"


def write_manifest(folder: Path, state: RunState) -> None:
    """Declare the checkpoint whole; everything else in it must be on disk already."""
    temporary = folder / (MANIFEST + ".incomplete")
    with temporary.open("w") as file:
        json.dump(asdict(state), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST)


def read_manifest(folder: Path) -> RunState:
    """Raises UserError for a manifest that this version did not write."""
    try:
        return RunState(**json.loads((folder / MANIFEST).read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST}: not a checkpoint manifest ({error}): remove that folder") from error


def latest_checkpoint(run_folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    whole = sorted(path.parent for path in (run_folder / "checkpoints").glob(f"step_*/{MANIFEST}"))
    return whole[-1] if whole else None


def begin_checkpoint(folder: Path) -> None:
    """An empty folder to save into; what a killed save left there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def prune_checkpoints(run_folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints, manifest first."""
    whole = sorted(path.parent for path in (run_folder / "checkpoints").glob(f"step_*/{MANIFEST}"))
    for folder in whole[:-keep]:
        (folder / MANIFEST).unlink()
        shutil.rmtree(folder)


def claim_run_folder(run_folder: Path, resolved: str, resume: bool) -> None:
    """Make the folder this run's: write the resolved settings, or check that they are those it has.

    Raises UserError where the folder holds a run of other settings, or a finished part that must not be lost.
    """
    file = run_folder / "settings.yaml"
    if not file.exists():
        run_folder.mkdir(parents=True, exist_ok=True)
        file.write_text(resolved)
        return
    changed = _difference(file.read_text(), resolved)
    if changed:
        raise UserError(
            f"{run_folder} holds a run of other settings ({changed}): choose another run.folder, or remove it"
        )
    if not resume and latest_checkpoint(run_folder):
        raise UserError(f"{run_folder} holds checkpoints of this run: set run.resume=auto to go on, or remove it")


def _difference(old: str, new: str) -> str:
    """The first line in which two resolved files differ, without settings that may change between attempts."""
    free = ("steps:", "save_every:", "eval_every:", "resume:", "keep_checkpoints:", "export:")
    olds, news = ([line for line in text.splitlines() if not line.strip().startswith(free)] for text in (old, new))
    for was, now in zip(olds, news, strict=False):
        if was != now:
            return f"{was.strip()} there, {now.strip()} here"
    return "" if len(olds) == len(news) else "one has more settings"
