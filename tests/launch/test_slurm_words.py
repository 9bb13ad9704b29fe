"""Slurm's words to torchrun's."""

import pytest

from grpo_mp.errors import UserError
from grpo_mp.launch.slurm import rank_environment, tasks_per_node

TASK = {
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}


def test_a_task_is_a_rank() -> None:
    expected = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert rank_environment(TASK) == expected


def test_a_process_that_srun_did_not_start_is_refused() -> None:
    with pytest.raises(UserError, match=r"SLURM_STEP_NUM_TASKS.*start this with srun"):
        rank_environment({name: value for name, value in TASK.items() if name != "SLURM_STEP_NUM_TASKS"})


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("8(x16)", 8), ("4,4(x2)", 4)])
def test_equal_counts(text: str, count: int) -> None:
    assert tasks_per_node(text) == count


def test_unequal_counts_are_refused() -> None:
    with pytest.raises(UserError, match="different numbers of tasks"):
        tasks_per_node("8(x15),4")
