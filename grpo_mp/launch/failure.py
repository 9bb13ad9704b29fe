"""Find which rank of an attempt failed first, and the last lines of its log."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

NUM_LAST_LINES = 15
SRUN_TASK_ENDED = re.compile(r"error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<how>.+)")


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt. `rank` is None where it is unknown."""

    rank: int | None
    reason: str
    last_lines: tuple[str, ...]  # of the rank's log

    def text(self) -> str:
        """Return what to print first."""
        failed = "the job" if self.rank is None else f"rank {self.rank}"
        return "\n".join([f"{failed} failed: {self.reason}", *(f"  {line}" for line in self.last_lines)])


def error_file(attempt: str, rank: str) -> str:
    """Return the file in which a rank leaves the message it ends with."""
    return str(Path(attempt, f"rank_{rank}.error.json").absolute())


def first_failure(attempt: Path) -> Failure:
    """Return a signal's death that srun saw first, else the oldest error file of a rank, else the end of srun's log.

    srun ends the other ranks after the first that fails: what they report then is only a consequence.
    """
    srun_log = attempt / "srun.log"
    ended = SRUN_TASK_ENDED.search(srun_log.read_text()) if srun_log.exists() else None
    if ended and not ended["how"].startswith("Exited"):
        rank = int(ended["rank"])
        return Failure(rank, f"{ended['how']} on {ended['node']}", _last_lines(attempt / f"rank_{rank}.log"))
    errors = [(file.stat().st_mtime, file) for file in attempt.glob("rank_*.error.json")]
    if errors:
        _, file = min(errors)
        rank = int(file.name.split("_")[1].split(".")[0])
        message = json.loads(file.read_text())["message"]["message"]
        return Failure(rank, message, _last_lines(attempt / f"rank_{rank}.log"))
    return Failure(None, f"no rank said why; the end of {srun_log}:", _last_lines(srun_log))


def _last_lines(log: Path) -> tuple[str, ...]:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return tuple([line for line in lines if line.strip()][-NUM_LAST_LINES:])
