"""A rank's mark that it came to its end: a process can end with status 0 without having finished anything.

Code that a rank calls may end its process (`_exit` of C, for one): no handler runs, and the status says all is well.
"""

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = "GRPO_MP_ENDED"  # environment variable: where ranks leave their marks; without it they leave none


def mark_end(rank: int, environment: Mapping[str, str] = os.environ) -> None:
    """Leave this rank's mark, where whoever started it looks for one."""
    if FOLDER in environment:
        _mark(Path(environment[FOLDER]), rank).touch()


def unmarked(folder: Path, ranks: int) -> list[int]:
    """Ranks that left no mark."""
    return [rank for rank in range(ranks) if not _mark(folder, rank).exists()]


def vanished_sentence(rank: int) -> str:
    """What to say of a rank that ended with status 0 and left no mark."""
    return (
        f"rank {rank} ended with status 0 before the run did: something that it called ended its process; look for an "
        "exit in reward functions and what they import"
    )


def _mark(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.ended"
