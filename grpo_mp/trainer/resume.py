"""Find the checkpoint that a run resumes from: the newest that is whole."""

from collections.abc import Iterable
from pathlib import Path

from grpo_mp.checkpoint.run_state import read_manifest, set_aside
from grpo_mp.distributed.process_groups import Job, broadcast
from grpo_mp.utils.errors import UserError


def find_whole_checkpoint(checkpoints: Iterable[Path], job: Job) -> tuple[Path | None, list[str]]:
    """Return the first whole checkpoint, and a sentence on each damaged one before it, which is renamed.

    Where none is whole, raises the first one's UserError and leaves all as they are.
    """
    found, damages = broadcast(_first_whole(checkpoints) if job.rank == 0 else (None, {}), job.group)
    if found is None:
        if damages:
            raise UserError(next(iter(damages.values())))
        return None, []
    notes = []
    for folder, damage in damages.items():
        if job.rank == 0:
            set_aside(folder)
        what, _, _ = damage.partition(": copy it again")
        notes.append(f"{what}: the run resumes from {found.name}; {folder.name} is now {folder.name}.damaged")
    return found, notes


def _first_whole(checkpoints: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    damages: dict[Path, str] = {}
    for folder in checkpoints:
        try:
            read_manifest(folder)
        except UserError as error:
            damages[folder] = str(error)
        else:
            return folder, damages
    return None, damages
