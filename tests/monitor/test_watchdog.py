"""The watchdog ending real processes that hang."""

import subprocess
import sys
from pathlib import Path

from grpo_mp.monitor import watchdog

HEAD = """
import ctypes, queue, sys, threading, time
from pathlib import Path
from grpo_mp.monitor import watchdog
sys.setswitchinterval(3600)  # a thread runs until it waits: the body has come to where it hangs
watchdog.GRACE_S, watchdog.BEFORE_EXIT_LIMIT_S = 120.0, 120.0
run = Path(sys.argv[1])
"""


def run_hanging(body: str, run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + body, str(run)]
    return subprocess.run(command, timeout=300, check=False, capture_output=True, text=True)


def test_hanging_phase_ends_the_process_and_names_the_place(tmp_path: Path) -> None:
    body = """
def stuck_in_a_collective():
    threading.Event().wait()

def last():
    (run / "last").write_text("ran")

print("buffered line", end="")
dog = watchdog.Watchdog(5, run, before_exit=[last])
with dog.phase("STEP", 60.0), dog.phase("GENERATE", 0.2):
    stuck_in_a_collective()
"""
    process = run_hanging(body, tmp_path)
    stacks = tmp_path / "logs" / "stuck_rank_5.txt"
    assert process.returncode == watchdog.STUCK_STATUS
    assert process.stderr.splitlines() == [
        f"error: rank 5: GENERATE passed its limit of 0.2 s; the stacks of all threads are in {stacks}"
    ]
    assert process.stdout == "buffered line"
    assert "stuck_in_a_collective" in stacks.read_text()
    assert (tmp_path / "last").read_text() == "ran"


def test_nothing_blocks_the_exit(tmp_path: Path) -> None:
    """Neither a function of the run's own nor a folder that cannot be written."""
    (tmp_path / "logs").write_text("a file where the folder should be")
    body = """
watchdog.BEFORE_EXIT_LIMIT_S = 0.1
dog = watchdog.Watchdog(0, run, before_exit=[threading.Event().wait])
with dog.phase("TRAIN", 0.1):
    time.sleep(3600)
"""
    process = run_hanging(body, tmp_path)
    assert process.returncode == watchdog.STUCK_STATUS
    assert "rank 0: TRAIN passed its limit" in process.stderr


def test_call_that_keeps_the_interpreter_lock_is_ended_too(tmp_path: Path) -> None:
    body = """
watchdog.GRACE_S = 0.5
dog, sleep = watchdog.Watchdog(0, run), ctypes.PyDLL(None).sleep
with dog.phase("SYNC", 0.1):
    sleep(3600)
"""
    process = run_hanging(body, tmp_path)
    assert process.returncode == 1
    assert 'File "<string>"' in process.stderr


def test_phases_within_their_limit_are_not_ended(tmp_path: Path) -> None:
    body = """
with watchdog.Watchdog(0, run) as dog:
    for _ in range(100):
        with dog.phase("TRAIN", 60.0):
            pass
    wait, limits = dog._changed.wait, queue.SimpleQueue()
    dog._changed.wait = lambda limit_s: limits.put(limit_s) or wait(limit_s)
    with dog._changed:
        dog._changed.notify()
    print(limits.get())
print("done")
"""
    process = run_hanging(body, tmp_path)
    assert (process.returncode, process.stdout, process.stderr) == (0, "None\ndone\n", "")
    assert not (tmp_path / "logs").exists()
