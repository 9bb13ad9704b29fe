"""What Slurm says to a task, in the words of torchrun. Pure."""

import re
from collections.abc import Mapping

from grpo_mp.errors import UserError

TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")


def rank_environment(slurm: Mapping[str, str]) -> dict[str, str]:
    """RANK and its companions for one task of `srun`; MASTER_ADDR and MASTER_PORT are the script's.

    Raises UserError where srun did not start this process, or nodes have different numbers of tasks.
    """
    try:
        return {
            "RANK": slurm["SLURM_PROCID"],
            "LOCAL_RANK": slurm["SLURM_LOCALID"],
            "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
            "LOCAL_WORLD_SIZE": str(tasks_per_node(slurm["SLURM_STEP_TASKS_PER_NODE"])),
        }
    except KeyError as error:
        raise UserError(f"{error} is not set: start this with srun, as launch/common.sh does") from error


def tasks_per_node(text: str) -> int:
    """'8(x16)' is 8. Raises UserError for '8(x15),4'."""
    counts = {int(match.group(1)) for match in TASKS.finditer(text)}
    if len(counts) != 1:
        raise UserError(f"the nodes have different numbers of tasks ({text}): set --ntasks-per-node and --nodes")
    return counts.pop()
