"""Programs that leave their bounds, run for real in bubblewrap; and a sandbox server that is asked instead."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from grpo_mp.rewards.sandbox import Outcome, Sandbox
from grpo_mp.utils.errors import UserError

LEAVES_A_PROCESS = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
time.sleep(0.3)
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def run(sandbox: Sandbox) -> Callable[..., bool]:
    """Runs a program, then asserts; returns whether they hold. The limit leaves room for a busy machine."""

    def call(program: str, asserts: str = "", timeout_s: float = 20.0) -> bool:
        return sandbox.run(f"{program}\n{asserts}", "", timeout_s).succeeded

    return call


def test_an_endless_program_ends_at_its_limit(run: Callable[..., bool]) -> None:
    for program in (
        "while True: pass",
        "import time; time.sleep(3600)",
        "import signal, time\n"
        "for n in range(1, 30):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: time.sleep(1)",
    ):
        assert not run(program, "", 0.5)


def test_memory_is_limited(run: Callable[..., bool]) -> None:
    assert run("try:\n    bytearray(2**30)\nexcept MemoryError:\n    stopped = True", "assert stopped")


def test_nothing_outside_can_be_written(run: Callable[..., bool], tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    places = [
        "/",
        "/tmp",
        "/usr",
        "/usr/lib",
        "/etc",
        "/var/tmp",
        "/dev/shm",
        str(tmp_path),
        str(Path(__file__).parent),
    ]
    program = f"""
written = []
for place in {places}:
    try:
        open(place + "/grpo_mp_hostile", "w").write("x")
        written.append(place)
    except OSError:
        pass
open("own", "w").write("mine")
"""
    assert run(program, "assert written == [] and open('own').read() == 'mine', written")
    assert not [place for place in places if (Path(place) / "grpo_mp_hostile").exists()]


def test_nothing_outside_can_be_read(run: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    program = f"""
import os
found = dict(os.environ)
seen = [p for p in ["/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/self/mem", {str(tmp_path / "secret")!r},
                    {__file__!r}] if os.path.exists(p)]
"""
    assert run(program, "assert not seen and 'SECRET_KEY' not in found and 'hunter2' not in str(found), seen")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def test_no_network(run: Callable[..., bool], listener: socket.socket) -> None:
    program = f"""
import socket
try:
    socket.create_connection({listener.getsockname()}, timeout=2).send(b"hello")
    connected = True
except OSError:
    connected = False
"""
    assert run(program, "assert not connected")
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_no_process_stays_behind(run: Callable[..., bool]) -> None:
    mark = f"grpo_mp_left_{time.monotonic_ns()}"
    program = LEAVES_A_PROCESS.format(mark=mark)
    assert run(program, "")
    assert not run(program + "time.sleep(60)", "", 1.0)
    _, left = psutil.wait_procs(processes_with(mark), timeout=60)  # the kernel ends them behind bwrap
    assert not left


def processes_with(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]


def test_input_and_status(sandbox: Sandbox) -> None:
    assert sandbox.run("print(input()[::-1])", "abc\n", 20.0) == Outcome(True, "cba")
    assert sandbox.run("print(input()); 1/0", "abc\n", 20.0) == Outcome(False, "abc")
    assert sandbox.run("try: input()\nexcept EOFError: print('end')", "", 20.0) == Outcome(True, "end")


OWNER = """
from grpo_mp.rewards.sandbox import Sandbox
sandbox = Sandbox()
print("an empty program has run", flush=True)
sandbox.run("import time; time.sleep(300)", "", 300.0)
"""


@pytest.mark.usefixtures("sandbox")
def test_a_program_ends_with_the_process_that_wanted_it() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        assert owner.stdout.readline()
        deadline = time.monotonic() + 60
        process = psutil.Process(owner.pid)
        while len(jailed := process.children(recursive=True)) < 3:  # bwrap inside and outside, and the program
            assert time.monotonic() < deadline
            time.sleep(0.05)
        owner.kill()
    _, left = psutil.wait_procs(jailed, timeout=60)
    assert left == []


def test_a_start_without_a_sandbox_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"^reward\.code: programs cannot be isolated here \(.*install bubblewrap and"):
        Sandbox()


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, object]]]]:
    """The address of a server that answers as SandboxFusion does, and what it was asked to run."""
    asked: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/run_code"
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            done = subprocess.run(
                [sys.executable, "-I", "-c", str(asked[-1]["code"])],
                input=str(asked[-1]["stdin"]),
                capture_output=True,
                text=True,
                check=False,
            )
            result = {
                "status": "Finished",
                "return_code": done.returncode,
                "stdout": done.stdout,
                "stderr": done.stderr,
            }
            body = json.dumps({"status": "Success" if not done.returncode else "Failed", "run_result": result})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()


def test_a_server_runs_programs_instead(server: tuple[str, list[dict[str, object]]]) -> None:
    url, asked = server
    sandbox = Sandbox(url=url)
    assert sandbox.run("print(input())", "abc\n", 3.0) == Outcome(True, "abc")
    assert not sandbox.run("1/0", "", 3.0).succeeded
    assert (asked[-1]["language"], asked[-1]["run_timeout"], asked[-1]["memory_limit_MB"]) == ("python", 3.0, 512)


def test_a_server_that_does_not_answer_is_refused_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(UserError, match=rf"http://127\.0\.0\.1:{port}: no answer of a sandbox server: ConnectError"):
        Sandbox(url=f"http://127.0.0.1:{port}")
