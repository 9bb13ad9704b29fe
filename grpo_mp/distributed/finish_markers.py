"""Files by which each rank says that it finished, because exit status 0 does not prove it.

User code in a rank may end the process with status 0 (C's `_exit`, for example) and no Python handler runs.
"""

import os
from pathlib import Path

FINISHED_DIR_VARIABLE = "GRPO_MP_FINISHED_DIR"  # names the folder of markers; without it ranks write none


def mark_finished(rank: int) -> None:
    """Write this rank's marker into the folder that its launcher named."""
    if folder := os.environ.get(FINISHED_DIR_VARIABLE):
        _marker(Path(folder), rank).touch()


def ranks_without_marker(folder: Path, ranks: int) -> list[int]:
    """Return the ranks that wrote no marker."""
    return [rank for rank in range(ranks) if not _marker(folder, rank).exists()]


def silent_exit_message(rank: int) -> str:
    """Return the error message for a rank that exited with status 0 and wrote no marker."""
    return (
        f"rank {rank} exited with status 0 before the run finished: look for an exit call in reward functions and what "
        "they import"
    )


def _marker(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.finished"
