"""A run's folder and its checkpoints. A checkpoint is complete if it has a manifest, which is written last."""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from grpo_mp.checkpoint.settings_changes import describe_changes, settings_changes
from grpo_mp.data.cursor import Cursor
from grpo_mp.data.template_date import write_date
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.files import remove_incomplete, sync_to_disk, write_atomically, write_json
from grpo_mp.utils.reading import parse_yaml, read_json, read_yaml, refuse_unreadable
from grpo_mp.utils.redact import has_secrets

MANIFEST = "manifest.json"
SETTINGS = "settings.yaml"
FINAL = "final"  # the exported Hugging Face folder
ROLLOUTS = "rollouts"  # folder of the responses generated since the last FALLBACKS checkpoints
FALLBACKS = 2  # newest checkpoints after which rollouts are kept, so that a resume can skip a damaged checkpoint
CHECKPOINTS = "checkpoints"
PROCESSES = "processes"  # folder with the host and process id of each rank, and its stack traces on request
METRICS = "metrics.jsonl"  # one line per step
EXPORTS = "exports"  # folder of the Hugging Face folders that are exported during the run
STEP = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,})")  # folders with other names are copies that users made


@dataclass(frozen=True)
class TrainState:
    """State between two steps, from which a run resumes."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int = 0  # number of finished steps
    optimizer_step: int = 0
    samples_seen: int = 0
    cursor: Cursor | None = None  # position in the train prompts
    groups_launched: int = 0
    skipped_until: Mapping[int, int] = field(default_factory=dict)  # prompt index -> step until which it is skipped
    solve_rates: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # prompt index -> its last solve rates
    adaptive_coefs: dict[str, float] = field(default_factory=dict)  # current values of adaptive coefficients
    reference_updated: bool = False  # True: the reference model changed, and the checkpoint has its weights
    skipped_in_a_row: int = 0  # number of latest updates that were skipped: the gradient was not finite or too large
    critic_skipped_in_a_row: int = 0  # skipped_in_a_row of the critic
    data: str = ""  # digest of the train set to which the cursor and the prompt indices refer


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint that is saved after `step` steps."""
    return run_folder / CHECKPOINTS / f"step_{step:06d}"


def write_manifest(folder: Path, state: TrainState) -> None:
    """Complete a checkpoint: sync its files to disk and write the manifest with the state and the files' sizes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))
    for path in {*files, *(file.parent for file in files), folder, folder.parent}:
        sync_to_disk(path)
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    write_json(folder / MANIFEST, {"state": asdict(state), "files": sizes})
    sync_to_disk(folder)


def read_manifest(folder: Path) -> TrainState:
    """Return the state in a checkpoint's manifest; refuse a checkpoint with missing or truncated files."""
    hint = f"copy it again, or rename {folder.name} to resume from the one before"
    try:
        manifest = read_json(folder / MANIFEST)
        state = TypeAdapter(TrainState).validate_python(manifest["state"])
        sizes = dict(manifest["files"])
    except (UserError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST}: not a checkpoint manifest ({one_line(error)}): {hint}") from error
    for name, size in sizes.items():
        file = folder / name
        is_whole = file.is_file() and file.stat().st_size == size
        if not is_whole:
            raise UserError(f"{folder}: damaged checkpoint, {name} is missing or cut short: {hint}")
    return state


def latest_checkpoint(run_folder: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint, or None."""
    return next(reversed(complete_checkpoints(run_folder)), None)


def saved_step(run_folder: Path) -> int:
    """Return the step of the newest undamaged checkpoint; 0 if there is none."""
    return saved_state(run_folder).step


def saved_state(run_folder: Path) -> TrainState:
    """Return the state of the newest undamaged checkpoint; the state of step 0 if there is none."""
    for checkpoint in reversed(complete_checkpoints(run_folder)):
        with suppress(UserError):
            return read_manifest(checkpoint)
    return TrainState()


def checkpoint_step(folder: Path) -> int:
    """Return the step after which a checkpoint was saved, from its folder name."""
    return int(folder.name.removeprefix("step_"))


def begin_checkpoint(folder: Path) -> None:
    """Create an empty checkpoint folder; delete the files of a save that was killed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def prune_checkpoints(run_folder: Path, keep: int) -> None:
    """Delete all complete checkpoints except the newest `keep`, each with its manifest first."""
    for folder in complete_checkpoints(run_folder)[:-keep]:
        (folder / MANIFEST).unlink()
        shutil.rmtree(folder)


def check_run_folder(run_folder: Path, resolved: str, resume: bool) -> None:
    """Refuse a run folder that is not writable, or has results of a run with other settings. Write nothing.

    `resolved`: the run's settings as YAML; `resume`: whether a run with checkpoints may be resumed. The files of a run
    that never finished a step do not count as results.
    """
    with refuse_unreadable(run_folder):
        existing = next(path for path in (run_folder, *run_folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"{run_folder}: {existing} is not a folder that can be written to: choose another run.folder")
    checkpoint = latest_checkpoint(run_folder)
    file = run_folder / SETTINGS
    if checkpoint is None and not (run_folder / METRICS).exists():
        return
    difference = f"it has no {SETTINGS}"
    if file.exists():
        changes = settings_changes(read_yaml(file), parse_yaml(resolved, "settings"))
        refused = next((change for change in changes if not change.allowed), None)
        difference = f"{refused.name} was {refused.before!r}, is now {refused.now!r}" if refused else ""
    if difference:
        raise UserError(
            f"{run_folder} holds a run of other settings ({difference}): choose another run.folder, or move it away"
        )
    if checkpoint and not resume:
        raise UserError(f"{run_folder} has checkpoints of this run: set run.resume=auto to resume it, or move it away")
    if checkpoint and not saved_step(run_folder):
        read_manifest(checkpoint)  # all checkpoints are damaged: raise the error of the newest


def check_same_data(run_folder: Path, data: str) -> None:
    """Refuse to resume with other train data. `data`: digest of the train set; "" for a replay, which has none."""
    state = saved_state(run_folder)
    if data and state.data not in ("", data):
        raise UserError(
            f"{run_folder}: the rows of data.train are no longer those of the run's first {state.step} steps, or the "
            "model's template is not: take those, or another run.folder"
        )


def resumable_checkpoints(run_folder: Path, data: str) -> list[Path]:
    """Return the complete checkpoints, newest first, after `check_same_data`."""
    check_same_data(run_folder, data)
    return complete_checkpoints(run_folder)[::-1]


def claim_run_folder(run_folder: Path, resolved: str) -> list[str]:
    """Write the settings and the date of the start into the run folder, after `check_run_folder`.

    Return a sentence for each changed setting. Delete rollouts of a run with other settings that never finished a step,
    and unfinished files of killed processes. Only one rank calls this, before other ranks write to the folder.
    """
    file = run_folder / SETTINGS
    sentences = list[str]()
    if file.exists():
        old = read_yaml(file)
        new = parse_yaml(resolved, "settings")
        if not all(change.allowed for change in settings_changes(old, new)):
            shutil.rmtree(run_folder / ROLLOUTS, ignore_errors=True)
        if (run_folder / METRICS).exists():
            sentences = describe_changes(old, new)
        shutil.rmtree(run_folder / PROCESSES, ignore_errors=True)  # left by ranks that were killed
        for checkpoint in (run_folder / CHECKPOINTS).glob("step_*"):  # delete those left by a killed save or deletion
            if STEP.fullmatch(checkpoint.name) and not (checkpoint / MANIFEST).exists():
                shutil.rmtree(checkpoint, ignore_errors=True)
        remove_incomplete(run_folder)
    write_date(run_folder)
    write_settings(run_folder, resolved)
    return sentences


def write_settings(run_folder: Path, resolved: str) -> None:
    """Write the settings `resolved` (YAML) to the run folder; only this user may read them if they have secrets."""
    write_atomically(run_folder / SETTINGS, resolved, private=has_secrets(parse_yaml(resolved, SETTINGS)))


def complete_checkpoints(run_folder: Path) -> list[Path]:
    """Return the folders of a run's complete checkpoints, oldest first, without copies under other names."""
    folders = (run_folder / CHECKPOINTS).glob("step_*")
    complete = [path for path in folders if STEP.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(complete, key=checkpoint_step)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that the run resumes from the one before it; return the new path."""
    aside = folder.with_name(f"{folder.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)
