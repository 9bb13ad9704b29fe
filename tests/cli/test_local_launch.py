"""Ranks of one machine: as forks of their launcher they behave like interpreters of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

LAUNCHER = """
import sys
from grpo_mp.cli import local_launch
local_launch.INTERRUPT_LIMIT_S = 1
sys.exit(local_launch.start_ranks(2, sys.argv[1:], "rank_module"))
"""
# Rank 0 is deaf, as one that waits in C++; rank 1 ends as an interrupted rank does.
DEAF = """
import os, pathlib, signal, sys, time

def main(arguments):
    rank = os.environ["RANK"]
    if rank == "0":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pathlib.Path("started_" + rank).touch()
        time.sleep(600)
    except KeyboardInterrupt:
        sys.exit(130)
"""
# What could differ from a new interpreter, in a file per rank.
CURIOUS = """
import atexit, json, multiprocessing, os, pathlib, signal, sys, threading, time
import torch
from torch.distributed.elastic.multiprocessing import api

print("imported")  # into the buffer of a pipe

def write(name):
    (pathlib.Path.cwd() / (name + os.environ["RANK"])).touch()

def main(arguments):
    print("rank", os.environ["RANK"], *arguments)
    atexit.register(write, "exit_")
    threading.Thread(target=lambda: (time.sleep(0.5), write("thread_"))).start()
    found = {
        "handlers": [n for n in signal.valid_signals() if callable(signal.getsignal(n)) and n != signal.SIGINT],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "leads its session": os.getsid(0) == os.getpid(),
        "stdin": sys.stdin.read(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "daemon": multiprocessing.parent_process() is not None,
        "threads": [torch.get_num_threads(), threading.active_count()],
        "error file": os.environ["TORCHELASTIC_ERROR_FILE"].split(os.sep)[-2],
    }
    pathlib.Path("found_" + os.environ["RANK"]).write_text(json.dumps(found))
    print("last", end="")
"""
ENDINGS = """
import os, sys, time

def main(arguments):
    rank = int(os.environ["RANK"])
    time.sleep(0.02 * (1 - rank))  # rank 1 is the first
    exec(arguments[rank])
"""


def start(folder: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a launcher of two ranks that run `main` of `source`."""
    (folder / "rank_module.py").write_text(source)
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def wait_for_ranks(launcher: subprocess.Popen[str], folder: Path) -> list[psutil.Process]:
    """Return the processes of both ranks when they have started."""
    while not all((folder / f"started_{rank}").exists() for rank in (0, 1)):
        assert launcher.poll() is None
        time.sleep(0.05)
    return psutil.Process(launcher.pid).children()


def test_rank_that_does_not_see_ctrl_c_is_killed(tmp_path: Path) -> None:
    launcher = start(tmp_path, DEAF)
    wait_for_ranks(launcher, tmp_path)
    launcher.send_signal(signal.SIGINT)
    _, message = launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + signal.SIGINT
    assert message == "stopped by Ctrl-C; ranks that had not ended within 1 s were killed\n"


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    launcher = start(tmp_path, DEAF)
    ranks = wait_for_ranks(launcher, tmp_path)
    launcher.kill()
    launcher.communicate(timeout=300)
    assert len(ranks) == 2
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


def test_a_rank_finds_what_a_new_interpreter_finds(tmp_path: Path) -> None:
    launcher = start(tmp_path, CURIOUS, "one", "two words")
    out, err = launcher.communicate(timeout=300)
    assert (launcher.returncode, err) == (0, "")
    lines = out.replace("last", "").splitlines()
    assert sorted(lines) == ["imported", "rank 0 one two words", "rank 1 one two words"]
    assert lines[0] == "imported"  # once, before its ranks
    assert out.count("last") == 2
    for rank in (0, 1):
        assert json.loads((tmp_path / f"found_{rank}").read_text()) == {
            "handlers": [],
            "blocked": [],
            "leads its session": True,
            "stdin": "",
            "start method": None,
            "daemon": False,
            "threads": [1, 2],
            "error file": str(rank),
        }
        assert (tmp_path / f"exit_{rank}").exists()
        assert (tmp_path / f"thread_{rank}").exists()


@pytest.mark.parametrize(
    ("first", "second", "status", "message"),
    [
        ("time.sleep(60)", "sys.exit(2)", 2, ""),
        ("sys.exit(2)", "sys.exit(1)", 2, ""),  # rank 1 lost rank 0
        ("sys.exit(143)", "sys.exit(0)", 143, ""),
        ("os.kill(os.getpid(), 9)", "sys.exit(1)", 137, "error: rank 0 was ended by SIGKILL\n"),
        ("time.sleep(60)", "1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_the_status_is_of_the_rank_that_failed(
    tmp_path: Path, first: str, second: str, status: int, message: str
) -> None:
    launcher = start(tmp_path, ENDINGS, first, second)
    out, err = launcher.communicate(timeout=300)
    assert (launcher.returncode, out) == (status, "")
    assert err.endswith(message)
    assert err.count("Traceback") == ("Error" in message)
    assert message or not err
