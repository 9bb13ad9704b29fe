"""Translate the environment of a Slurm task into that of a torchrun rank. Pure."""

import re
from collections.abc import Mapping

from grpo_mp.errors import UserError

TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x\d+\))?")


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and LOCAL_* of one task of `srun`; the script sets MASTER_ADDR and MASTER_PORT.

    Raises UserError where srun did not start this process, or nodes have different numbers of tasks.
    """
    try:
        return {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_WORLD_SIZE": str(tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])),
        }
    except KeyError as error:
        raise UserError(f"{error} is not set: start this with srun, as launch/common.sh does") from error


def tasks_per_node(value: str) -> int:
    """Parse SLURM_STEP_TASKS_PER_NODE: '8(x16)' is 8. Raises UserError for '8(x15),4'."""
    counts = {int(match.group(1)) for match in TASKS_PER_NODE.finditer(value)}
    if len(counts) != 1:
        raise UserError(f"the nodes have different numbers of tasks ({value}): set --ntasks-per-node and --nodes")
    return counts.pop()
