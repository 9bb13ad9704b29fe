"""Which rank of an attempt failed first, and its last words."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

LAST_LINES = 15
ENDED = re.compile(r"error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<how>.+)")


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt. `rank` is None where none could be made out."""

    rank: int | None
    what: str
    lines: tuple[str, ...]  # the last of the rank's log

    def text(self) -> str:
        """What to print first."""
        who = "the job" if self.rank is None else f"rank {self.rank}"
        return "\n".join([f"{who} failed: {self.what}", *(f"  {line}" for line in self.lines)])


def error_file(attempt: str, rank: str) -> str:
    """Where a rank leaves the message it ends with."""
    return str(Path(attempt, f"rank_{rank}.error.json").absolute())


def first_failure(attempt: Path) -> Failure:
    """A signal's death that srun saw first, else the ranks' error files, else the end of srun's own log.

    srun ends the other ranks after the first bad one: their messages then are of what it took from them.
    """
    killed = _killed_first(attempt / "srun.log")
    errors = [(_when(file), file) for file in attempt.glob("rank_*.error.json")]
    if killed:
        rank = int(killed["rank"])
        return Failure(rank, f"{killed['how']} on {killed['node']}", _last_lines(_log(attempt, rank)))
    if errors:
        file = min(errors)[1]
        rank = int(file.name.split("_")[1].split(".")[0])
        return Failure(rank, json.loads(file.read_text())["message"]["message"], _last_lines(_log(attempt, rank)))
    seen = attempt / "srun.log"
    return Failure(None, f"no rank said why; the end of {seen}:", _last_lines(seen))


def _killed_first(seen: Path) -> re.Match[str] | None:
    ends = list(ENDED.finditer(seen.read_text())) if seen.exists() else []
    return ends[0] if ends and not ends[0]["how"].startswith("Exited") else None


def _when(file: Path) -> float:
    return file.stat().st_mtime


def _log(attempt: Path, rank: int) -> Path:
    return attempt / f"rank_{rank}.log"


def _last_lines(log: Path) -> tuple[str, ...]:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return tuple([line for line in lines if line.strip()][-LAST_LINES:])
