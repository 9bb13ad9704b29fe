"""Real jobs in processes of their own: started, watched by their traces, signalled, and found to be gone."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, Signals
from socket import SOCK_DGRAM
from typing import Any

import psutil

LAUNCH = (sys.executable, "-m", "grpo_mp", "train", "--ranks", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "grpo_mp.train")
SLEEPING = (*TORCHRUN[:-1], "tests.e2e.sleeping_engines")  # its engines sleep and wake, as on a GPU
ALONE = (sys.executable, "-m", "grpo_mp.train")
MARK = "GRPO_MP_TEST_JOB"  # in the environment of every process of a job
LIMIT_S = 600.0
NOBODY = 65534
GONE_LIMIT_S = 120.0


class Job:
    """One running job of two ranks. Whatever it leaves behind, `end` ends."""

    def __init__(self, folder: Path, arguments: Sequence[str], command: Sequence[str] = LAUNCH) -> None:
        self._out = folder / "stdout.txt"
        self._err = folder / "stderr.txt"
        self._mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [*command, *arguments], stdout=out, stderr=err, env=environment, start_new_session=True
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def pid(self) -> int:
        """The launcher's."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit status."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.end()  # it would slow all that follows
            raise

    def wait_until(self, what: Callable[[], object]) -> None:
        """Return when `what` is true; fails when the job ends first."""
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert self._process.poll() is None, f"the job ended with {self._process.poll()}:\n{self.err}"
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"waited too long:\n{self.err}")
            time.sleep(0.02)

    def signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """To one rank, or to the launcher as a terminal or a scheduler does."""
        if rank is None:
            self._process.send_signal(number)
        else:
            self.rank(rank).send_signal(number)

    def kill_engine(self, index: int, number: Signals = SIGKILL) -> None:
        """Kill the processes of an engine as soon as there are some; those that watch it end by themselves."""

        def processes() -> list[psutil.Process]:
            mark = f"engine-{index}-"
            return [one for one in self.alive() if mark in (_variable(one, "GRPO_MP_ENGINE_ARGUMENTS") or "")]

        self.wait_until(processes)
        for process in processes():
            with suppress(psutil.NoSuchProcess):  # it ended with one of the others
                process.send_signal(number)

    def left(self) -> list[str]:
        """What still runs when the watchers of engines have had time to end them."""
        deadline = time.monotonic() + GONE_LIMIT_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.2)
        return [" ".join(process.cmdline()) for process in self.alive()]

    def alive(self) -> list[psutil.Process]:
        """Every process of this job: launcher, ranks, engines and their children."""
        return processes_of(self._mark)

    def listening(self) -> list[str]:
        """The address of every socket that takes connections or datagrams."""
        found = self._sockets()
        return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN or one.type == SOCK_DGRAM]

    def answers_to_strangers(self) -> dict[int, bytes]:
        """What each listening port answers another user of this machine who asks an engine without a key."""
        ports = sorted({one.laddr.port for one in self._sockets() if one.status == psutil.CONN_LISTEN})
        return as_nobody(lambda: ask_all(ports))

    def end(self) -> None:
        for process in self.alive():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(60.0)

    def _sockets(self) -> list[Any]:
        return [one for process in self.alive() for one in process.net_connections("inet")]

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        children = psutil.Process(self._process.pid).children()
        return next(child for child in children if _variable(child, "RANK") == str(rank))


def as_nobody(function: Callable[[], Any]) -> Any:
    """What a function returns in a process of another user; it must be plain data."""
    "127.0.0.1".encode("idna")  # the codec is imported here: the other user may not read its file
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, repr(function()).encode())
        except BaseException:  # noqa: BLE001 - the parent raises it
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        content = stream.read()
    os.waitpid(child, 0)
    assert not content.startswith(b"Traceback"), content.decode()
    return ast.literal_eval(content.decode())


def ask_all(ports: Sequence[int]) -> dict[int, bytes]:
    """What each port answers; those that never do are waited for at the same time."""
    with ThreadPoolExecutor(max(1, len(ports))) as pool:
        return dict(zip(ports, pool.map(ask, ports), strict=True))


def ask(port: int) -> bytes:
    """The first bytes that a port answers to a request of HTTP without a key; empty: none, or it hangs up."""
    request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        connection.settimeout(10.0)
        connection.sendall(request)
        return connection.recv(12)
    return b""


def processes_of(mark: str) -> list[psutil.Process]:
    """Every process with this mark in its environment."""
    return [process for process in psutil.process_iter() if _variable(process, MARK) == mark]


def spans(run: Path, rank: int, name: str) -> int:
    """How many spans of this name the rank has begun."""
    trace = run / "trace" / f"rank_{rank}.json"
    lines = trace.read_text().splitlines() if trace.exists() else []
    return sum('"ph": "B"' in line and f'"name": "{name}"' in line for line in lines)


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except psutil.Error:
        return None
