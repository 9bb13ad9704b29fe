"""launch/torchrun_node.sh tells its ranks to save, however early the signal comes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from grpo_mp.distributed.ports import claim_ports

ROOT = Path(__file__).parents[2]
RANKS, LIMIT_S = 2, 300.0
# Every Python runs this first. In a rank it stands for the run, which loads its model for minutes; the agent imports
# torchrun when ranks may start.
FIRST = """
import os, sys, time
from pathlib import Path

class HeldImport:
    def find_spec(self, name, path=None, target=None):
        while name == "torch.distributed.run" and not Path({folder!r}, "may_start").exists():
            time.sleep(0.05)

sys.meta_path.insert(0, HeldImport())
if sys.orig_argv[1:4] == ["-u", "-m", "grpo_mp.train"]:
    folder, rank = Path({folder!r}), os.environ["RANK"]
    (folder / f"loads_{{rank}}").touch()
    while not (folder / "loaded").exists():
        time.sleep(0.05)
    import signal
    from grpo_mp.trainer.exit import PreemptionHandler
    handler = PreemptionHandler()
    deadline = time.monotonic() + 120.0
    while not (told := handler._received or signal.SIGUSR1 in signal.sigpending()) and time.monotonic() < deadline:
        time.sleep(0.05)
    (folder / f"told_{{rank}}").write_text(str(told))
    os._exit(0)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[psutil.Popen]:
    """The script, as a task of Slurm on the only node of a step."""
    (tmp_path / "sitecustomize.py").write_text(FIRST.format(folder=str(tmp_path)))
    claim = claim_ports()
    variables = {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "OMP_NUM_THREADS": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(claim.port)}
    variables |= {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = ["bash", "launch/torchrun_node.sh", sys.executable, str(RANKS), str(tmp_path / "attempt")]
    agent = psutil.Popen(
        [*command, "configs/tiny_moe.yaml", "run.steps=1"],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    yield agent
    if agent.poll() is None:
        os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    claim.release()


def wait_until(agent: psutil.Popen, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert agent.poll() is None, agent.stdout.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def holds_the_signal(agent: psutil.Popen) -> bool:
    """Is it blocked, by Linux's account?"""
    text = Path(f"/proc/{agent.pid}/status").read_text()
    mask = re.search(r"^SigBlk:\s*(\w+)$", text, re.MULTILINE)
    assert mask
    return bool(int(mask[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def loading(folder: Path) -> list[Path]:
    return list(folder.glob("loads_*"))


def check_told(agent: psutil.Popen, folder: Path) -> None:
    (folder / "loaded").touch()
    output, _ = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode == 0, output.decode()
    assert [(folder / f"told_{rank}").read_text() for rank in range(RANKS)] == ["True"] * RANKS


def test_ranks_that_load_remember_the_signal(agent: psutil.Popen, tmp_path: Path) -> None:
    """Slurm sends it to every process of a step."""
    (tmp_path / "may_start").touch()
    wait_until(agent, lambda: len(loading(tmp_path)) == RANKS)
    for process in (agent, *agent.children(recursive=True)):
        process.send_signal(signal.SIGUSR1)
    check_told(agent, tmp_path)


def test_ranks_that_start_later_are_told(agent: psutil.Popen, tmp_path: Path) -> None:
    wait_until(agent, lambda: holds_the_signal(agent))
    agent.send_signal(signal.SIGUSR1)
    (tmp_path / "may_start").touch()
    wait_until(agent, lambda: len(loading(tmp_path)) == RANKS)
    check_told(agent, tmp_path)
