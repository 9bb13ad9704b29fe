"""A rank ends with the process that started it, also where that is gone before the rank asks for it.

A function in a thread: its end, its error, its limit.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from grpo_mp.utils.background import BackgroundTask
from grpo_mp.utils.errors import PhaseTimeout
from grpo_mp.utils.processes import LAUNCHER_PID, with_descendants

RANK = """
import os, sys, time
from pathlib import Path
parent = os.getppid()
Path(sys.argv[1]).write_text(str(os.getpid()))
while os.getppid() == parent and sys.argv[2] == "early":
    time.sleep(0.01)
from grpo_mp.utils.processes import end_with_launcher
end_with_launcher()
time.sleep(600)
"""
LAUNCHER = """
import os, subprocess, sys, time
from pathlib import Path
if sys.argv[4] == "ours":
    os.environ[sys.argv[5]] = str(os.getpid())
os.environ["TORCHELASTIC_RUN_ID"] = "1"
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], sys.argv[3]])
while not Path(sys.argv[2]).exists() or not Path(sys.argv[2]).read_text():
    time.sleep(0.01)
time.sleep(0 if sys.argv[3] == "early" else 3)
"""


@pytest.mark.skipif(b"torch" in Path("/proc/1/cmdline").read_bytes(), reason="process 1 is torchrun")
@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, launcher: str, when: str) -> None:
    """Its launcher ends before it has called `end_with_launcher`, or after; torchrun does not say its number."""
    file = tmp_path / "pid"
    command = [sys.executable, "-c", LAUNCHER, RANK, str(file), when, launcher, LAUNCHER_PID]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    rank = int(file.read_text())
    deadline = time.monotonic() + 120.0
    while psutil.pid_exists(rank) and psutil.Process(rank).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the rank is left behind"
        time.sleep(0.05)


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if not has_ended(pid)]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("end", ["of the starter", "SIGTERM", "of the command"])
def test_a_command_ends_with_all_that_it_has_started(tmp_path: Path, end: str) -> None:
    """Also a daemon of a session of its own, whose parent has ended."""
    daemon = "import time; time.sleep(600)"
    wait = "time.sleep(600)" if end != "of the command" else "pass"
    command = f"""
import os, subprocess, sys, time
tell = lambda pid: os.write(1, b"%d\\n" % pid)  # at once: others write there, too
told, telling = os.pipe()
for detached in (False, True):
    if not os.fork():
        tell(subprocess.Popen([sys.executable, "-c", {daemon!r}], start_new_session=detached).pid)
        os.write(telling, b".")
        os._exit(0) if detached else time.sleep(600)
for _ in range(2):
    os.read(told, 1)  # this process may be the first to end
tell(os.getpid())
{wait}
"""
    code = """
import subprocess, sys
from grpo_mp.utils.processes import with_descendants
sys.exit(subprocess.run(with_descendants([sys.executable, "-c", sys.argv[1]])).returncode)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    starter = subprocess.Popen([sys.executable, "-c", code, command], env=environment, stdout=subprocess.PIPE)
    assert starter.stdout
    pids = [int(starter.stdout.readline()) for _ in range(3)]
    (waiting,) = psutil.Process(starter.pid).children() if end != "of the command" else (starter,)
    if end == "of the starter":
        starter.kill()
    elif end == "SIGTERM":
        waiting.terminate()
    deadline = time.monotonic() + 120.0
    while left := running([waiting.pid, *pids]):
        assert time.monotonic() < deadline, f"{left} are left behind"
        time.sleep(0.05)
    assert starter.wait() == {"of the starter": -signal.SIGKILL, "SIGTERM": 128 + signal.SIGTERM}.get(end, 0)


def test_the_status_of_a_command_is_its_own() -> None:
    for code, status in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)):
        command = with_descendants([sys.executable, "-c", code])
        assert subprocess.run(command, check=False).returncode == status
    missing = subprocess.run(with_descendants(["/no/such"]), check=False, capture_output=True, text=True)
    assert (missing.returncode, missing.stderr) == (127, "/no/such: No such file or directory\n")


def test_an_error_is_raised_as_itself() -> None:
    error = KeyError("lost")

    def fail() -> None:
        raise error

    task = BackgroundTask(fail, "failing")
    with pytest.raises(KeyError) as caught:
        task.wait(0, "SAVE", 60.0)
    assert caught.value is error


def test_a_limit_names_rank_and_phase() -> None:
    go = threading.Event()

    def work() -> None:
        go.wait(60.0)

    task = BackgroundTask(work, "slow")
    with pytest.raises(PhaseTimeout, match=r"^rank 3: SAVE in the background passed its limit of 0\.05 s$"):
        task.wait(3, "SAVE", 0.05)
    go.set()
    task.wait(3, "SAVE", 60.0)
