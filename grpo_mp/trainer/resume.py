"""Find the checkpoint that a run resumes from: the newest whose files are those that were written."""

from collections.abc import Iterable
from pathlib import Path

from grpo_mp.checkpoint.run_state import checkpoint_checksums, set_aside
from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.utils.errors import UserError


def find_whole_checkpoint(checkpoints: Iterable[Path], job: Job) -> tuple[Path | None, list[str]]:
    """Return the first checkpoint that is whole, and a sentence on each before it, which is set aside.

    Every rank must call this: each reads a share of the files. Raises UserError, and leaves all as they are, where
    none is whole.
    """
    damages: list[tuple[Path, str]] = []
    for folder in checkpoints:
        damage = ""
        try:
            checkpoint_checksums(folder).check_share(job.rank, job.world_size)
        except UserError as error:
            damage = str(error)
        found = next(filter(None, all_gather(damage, job.group)), None)
        if found is None:
            return folder, [_set_aside(damaged, text, folder, job.rank) for damaged, text in damages]
        damages.append((folder, found))
    if damages:
        raise UserError(damages[0][1])
    return None, []


def _set_aside(folder: Path, damage: str, whole: Path, rank: int) -> str:
    if rank == 0:
        set_aside(folder)
    what, _, _ = damage.partition(": copy it again")
    return f"{what}: the run resumes from {whole.name}; {folder.name} is now {folder.name}.damaged"
