"""Read from what srun says of a step which nodes it lost, and which of its tasks ended first."""

import re
from dataclasses import dataclass
from pathlib import Path

TASK_ENDED = re.compile(r"error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<how>.+)")
NOT_STARTED = re.compile(r"error: Task launch for \S+ failed on node (?P<node>[^\s:]+): (?P<why>.+)")
NODE_FAILED = re.compile(r"error: Node failure on (?P<nodes>\S+)")
STEP_ABORTED = "Job step aborted"  # by srun itself, which then kills the tasks that are left


@dataclass(frozen=True)
class EndedTask:
    """Tasks of a node that ended together. `rank`: the first's. `how`: 'Killed', or 'Exited with exit code 1'."""

    node: str
    rank: int
    how: str

    @property
    def killed(self) -> bool:
        """Return whether a signal ended them."""
        return not self.how.startswith("Exited")


@dataclass(frozen=True)
class StepLog:
    """What srun says of a step. `lost`: node -> why. `ended`: in order; not those that srun's own abort of it ended."""

    lost: dict[str, str]
    ended: tuple[EndedTask, ...]
    aborted: bool


def read_step_log(log: Path) -> StepLog:
    """Read what srun wrote; of a missing file nothing happened."""
    lost, ended, aborted = dict[str, str](), list[EndedTask](), False
    # It holds what other programs print, too, in any encoding.
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if not_started := NOT_STARTED.search(line):
            lost.setdefault(not_started["node"], f"srun could not start its tasks ({not_started['why'].strip()})")
        elif failed := NODE_FAILED.search(line):
            lost.setdefault(failed["nodes"], "Slurm lost it")
        elif STEP_ABORTED in line:
            aborted = True
        elif (task := TASK_ENDED.search(line)) and not aborted:
            ended.append(EndedTask(task["node"], int(task["rank"]), task["how"]))
    return StepLog(lost, tuple(ended), aborted)
