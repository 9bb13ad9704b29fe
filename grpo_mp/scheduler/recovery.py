"""Steps as transactions on disk: a checkpoint counts once its manifest, written last, is there."""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_mp.errors import UserError

MANIFEST = "manifest.json"
SETTINGS = "settings.yaml"


@dataclass(frozen=True)
class RunState:
    """Where a run stands between two steps."""

    step: int = 0  # steps done
    optimizer_step: int = 0
    samples_seen: int = 0
    weight_version: int = 0
    cursor: dict[str, Any] | None = None  # of the train prompts
    groups_launched: int = 0
    right_in_a_row: dict[str, int] = field(default_factory=dict)  # by prompt index
    resting: dict[str, int] = field(default_factory=dict)  # prompt index -> step after which it is taken again
    controls: dict[str, float] = field(default_factory=dict)  # what adaptive weights have come to
    reference_refreshed: bool = False  # the checkpoint holds a reference of its own


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step_{step:06d}"


def write_manifest(folder: Path, state: RunState) -> None:
    """Declare the checkpoint whole: the state, and the size of every file, which must be on disk already."""
    temporary = folder / (MANIFEST + ".incomplete")
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in _files(folder) if file != temporary}
    with temporary.open("w") as file:
        json.dump({"state": asdict(state), "file_bytes": sizes}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST)


def read_manifest(folder: Path) -> RunState:
    """The state of a whole checkpoint.

    Raises UserError for a manifest that this version did not write, and where a file it names is missing or cut.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        state, sizes = RunState(**manifest["state"]), dict(manifest["file_bytes"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / MANIFEST}: not a checkpoint manifest ({error!r}): remove that folder") from error
    torn = next((name for name, size in sizes.items() if not _has_size(folder / name, size)), None)
    if torn:
        raise UserError(
            f"{folder}: the checkpoint is torn, {torn} is missing or cut short: "
            "remove that folder to go on from the checkpoint before it"
        )
    return state


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
            f"{run_folder} holds a run of other settings ({changed}): choose another run.folder, or remove it"
        )
    if checkpoint and not resume:
        raise UserError(f"{run_folder} holds checkpoints of this run: set run.resume=auto to go on, or remove it")
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


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
