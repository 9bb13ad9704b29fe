"""The environment of a Slurm task, translated into torchrun's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mp.cli.slurm_task import rank_environment
from grpo_mp.utils.errors import UserError

ROOT = Path(__file__).parents[2]
TASK_ENVIRONMENT = {
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
}


def test_rank_environment_of_a_task() -> None:
    expected = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert rank_environment(TASK_ENVIRONMENT) == expected


TOLD_EARLY = """
import os, signal, sys
from types import SimpleNamespace
from grpo_mp.cli import slurm_task as task

def main(command):  # in place of a run's, which loads its model for minutes
    os.kill(os.getpid(), signal.SIGUSR1)
    from grpo_mp.trainer.exit import PreemptionHandler
    handler = PreemptionHandler()
    print(handler._received or signal.SIGUSR1 in signal.sigpending())

task.import_module = lambda name: SimpleNamespace(main=main)
sys.argv[1:] = ["attempt", "configs/tiny_moe.yaml"]
task.main()
"""


@pytest.mark.parametrize("threads", ["1", "2"])  # of libraries; those of the latter do not block signals
def test_a_rank_told_to_save_while_it_loads_remembers_it(threads: str) -> None:
    environment = {**os.environ, **TASK_ENVIRONMENT, "OMP_NUM_THREADS": threads}
    output = subprocess.run(
        [sys.executable, "-c", TOLD_EARLY], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (output.returncode, output.stdout) == (0, "True\n"), output.stderr


def test_process_not_started_by_srun_is_refused() -> None:
    with pytest.raises(UserError, match=r"SLURM_STEP_NUM_TASKS.*start this with srun"):
        rank_environment({name: value for name, value in TASK_ENVIRONMENT.items() if name != "SLURM_STEP_NUM_TASKS"})
