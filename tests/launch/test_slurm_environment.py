"""The environment of a Slurm task, translated into torchrun's."""

import pytest

from grpo_mp.errors import UserError
from grpo_mp.launch.task import rank_environment, tasks_per_node

TASK_ENVIRONMENT = {
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}


def test_rank_environment_of_a_task() -> None:
    expected = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert rank_environment(TASK_ENVIRONMENT) == expected


def test_process_not_started_by_srun_is_refused() -> None:
    with pytest.raises(UserError, match=r"SLURM_STEP_NUM_TASKS.*start this with srun"):
        rank_environment({name: value for name, value in TASK_ENVIRONMENT.items() if name != "SLURM_STEP_NUM_TASKS"})


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("8(x16)", 8), ("4,4(x2)", 4)])
def test_equal_task_counts(text: str, count: int) -> None:
    assert tasks_per_node(text) == count


def test_unequal_task_counts_are_refused() -> None:
    with pytest.raises(UserError, match="different numbers of tasks"):
        tasks_per_node("8(x15),4")
