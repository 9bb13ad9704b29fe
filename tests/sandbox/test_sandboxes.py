"""Programs that leave their bounds, run for real in bubblewrap, Podman, a sandbox server and a class of the user's."""

import json
import shutil
import signal
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

from grpo_mp.sandbox.protocol import Limits, Outcome, SandboxError
from grpo_mp.sandbox.sandboxes import Sandboxes
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.json_worker import WorkerEndedError

LEAVES_A_PROCESS = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
time.sleep(0.3)
"""


@pytest.fixture(scope="module")
def sandboxes() -> Sandboxes:
    try:
        return Sandboxes("tests")
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def run(sandboxes: Sandboxes) -> Callable[..., bool]:
    """Runs a program, then asserts; returns whether they hold. The limit leaves room for a busy machine."""

    def call(program: str, asserts: str = "", timeout_s: float = 20.0) -> bool:
        return sandboxes.run(f"{program}\n{asserts}", "", timeout_s).status == 0

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


def test_input_and_status(sandboxes: Sandboxes) -> None:
    assert sandboxes.run("print(input()[::-1])", "abc\n", 20.0) == Outcome(0, "cba\n")
    ended = sandboxes.run("print(input()); exit(3)", "abc\n", 20.0)
    assert ended == Outcome(3, "abc\n")
    assert "ZeroDivisionError" in sandboxes.run("1/0", "", 20.0).stderr
    assert sandboxes.run("try: input()\nexcept EOFError: print('end')", "", 20.0) == Outcome(0, "end\n")
    assert sandboxes.run("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "", 20.0) == Outcome(None, "")


def test_commands_and_files_of_one_sandbox(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.start()
    try:
        sandbox.write("lib/one.txt", bytes(range(256)))
        assert sandbox.read("lib/one.txt") == bytes(range(256))
        assert sandbox.exec(["sh", "-c", "wc -c < lib/one.txt; echo two > two.txt"]) == Outcome(0, "256\n")
        assert sandbox.exec(["cat", "two.txt", "-"], stdin="three") == Outcome(0, "two\nthree")
        assert sandbox.exec(["sh", "-c", "echo begun; sleep 60 & sleep 60"], timeout_s=0.5) == Outcome(None, "begun\n")
        assert sandbox.exec(["no_such_program"]).status == 127
        flood = sandbox.exec(["yes"], timeout_s=20.0)
        assert flood.status == -signal.SIGXFSZ
        assert len(flood.stdout) == Limits().output_bytes
        with pytest.raises(OSError, match="No such file"):
            sandbox.read("missing.txt")
    finally:
        sandbox.stop()
    with pytest.raises(WorkerEndedError):
        sandbox.exec(["true"])


def test_sandboxes_do_not_count_the_processes_of_others(sandboxes: Sandboxes) -> None:
    """The kernel counts the processes of a user, and the limit of one sandbox is 16."""
    started = [sandboxes.start() for _ in range(24)]
    try:
        outcomes = {
            sandbox.exec(["sh", "-c", "for i in 1 2 3; do true | true; done; echo done"]) for sandbox in started
        }
        assert outcomes == {Outcome(0, "done\n")}
        bomb = ["sh", "-c", "for i in $(seq 40); do sleep 30 & done; echo done"]
        assert "fork" in started[0].exec(bomb, timeout_s=20.0).stderr
    finally:
        for sandbox in started:
            sandbox.stop()


def test_programs_of_a_root_file_system(tmp_path: Path) -> None:
    """A folder as `docker export` leaves it; here its programs are links into this machine's."""
    for name in ("usr", "bin", "lib", "lib64"):
        (tmp_path / name).symlink_to(f"usr/{name}") if name != "usr" else copy_python(tmp_path / "usr")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/readme").write_text("of the image")
    tmp_path.chmod(0o755)
    sandboxes = Sandboxes("tests", f"bubblewrap:{tmp_path}")
    program = "print(open('/repository/readme').read()); open('/repository/new', 'w')"
    outcome = sandboxes.run(program, "", 20.0)
    assert outcome.stdout == "of the image\n"
    assert "Read-only file system" in outcome.stderr


OWNER = """
from grpo_mp.sandbox.sandboxes import Sandboxes
sandboxes = Sandboxes("tests")
print("an empty program has run", flush=True)
sandboxes.run("import time; time.sleep(300)", "", 300.0)
"""


@pytest.mark.usefixtures("sandboxes")
def test_a_program_ends_with_the_process_that_wanted_it() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        assert owner.stdout.readline()
        deadline = time.monotonic() + 60
        process = psutil.Process(owner.pid)
        while len(jailed := process.children(recursive=True)) < 4:  # bwrap inside and outside, the agent, the program
            assert time.monotonic() < deadline
            time.sleep(0.05)
        owner.kill()
    _, left = psutil.wait_procs(jailed, timeout=60)
    assert left == []


def test_a_start_without_a_sandbox_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UserError, match=r"^tests: programs cannot be isolated by bubblewrap \(.*install bubblewrap and"
    ):
        Sandboxes("tests")


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
    sandboxes = Sandboxes("tests", url)
    assert sandboxes.run("print(input())", "abc\n", 3.0) == Outcome(0, "abc\n")
    assert sandboxes.run("1/0", "", 3.0).status == 1
    assert (asked[-1]["language"], asked[-1]["run_timeout"], asked[-1]["memory_limit_MB"]) == ("python", 3.0, 512)
    with pytest.raises(SandboxError, match="it needs a sandbox of the kinds bubblewrap, docker, podman"):
        sandboxes.start()


def test_a_server_that_does_not_answer_is_refused_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(UserError, match=rf"http://127\.0\.0\.1:{port}: no answer of a sandbox server: ConnectError"):
        Sandboxes("tests", f"http://127.0.0.1:{port}")


OWN_CLASS = """
import subprocess, sys, tempfile
from pathlib import Path
from grpo_mp.sandbox.protocol import Outcome

class Folder:
    def __init__(self, limits):
        self.folder = tempfile.TemporaryDirectory()
    def exec(self, command, stdin="", timeout_s=60.0):
        done = subprocess.run(command, input=stdin, cwd=self.folder.name, capture_output=True, text=True)
        return Outcome(done.returncode, done.stdout, done.stderr)
    def write(self, path, content):
        Path(self.folder.name, path).write_bytes(content)
    def read(self, path):
        return Path(self.folder.name, path).read_bytes()
    def stop(self):
        self.folder.cleanup()
"""


def test_a_class_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_CLASS)
    sandboxes = Sandboxes("tests", f"{tmp_path / 'own.py'}:Folder")
    assert sandboxes.run("print(input())", "abc\n", 3.0) == Outcome(0, "abc\n")
    with pytest.raises(UserError, match=r"^tests: .* has no Fodler \(did you mean Folder\?\)"):
        Sandboxes("tests", f"{tmp_path / 'own.py'}:Fodler")


@pytest.mark.skipif(not (shutil.which("podman") and shutil.which("runc")), reason="needs Podman and runc")
def test_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with this machine's Python, which leaves nothing behind when the process that started it is killed."""
    copy_python(tmp_path / "root/usr")
    for name in ("bin", "lib", "lib64"):
        (tmp_path / "root" / name).symlink_to(f"usr/{name}")
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/store"\nrunroot = "{tmp_path}/run"\n'
    )
    (tmp_path / "containers.conf").write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    packed = subprocess.run(["tar", "-C", tmp_path / "root", "-c", "."], capture_output=True, check=True)
    subprocess.run(["podman", "import", "-", "python:test"], input=packed.stdout, capture_output=True, check=True)
    sandboxes = Sandboxes("tests", "podman:python:test")
    assert sandboxes.run("print(input())", "abc\n", 20.0) == Outcome(0, "abc\n")
    assert sandboxes.run("bytearray(2**30)", "", 20.0).status == 1
    assert "unreachable" in sandboxes.run("import socket; socket.create_connection(('1.1.1.1', 80))", "", 20.0).stderr
    owner = OWNER.replace('"tests"', '"tests", "podman:python:test"').replace("300", "3")
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        deadline = time.monotonic() + 60
        while not containers():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    while containers():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def containers() -> list[str]:
    listed = subprocess.run(["podman", "ps", "-a", "-q"], capture_output=True, text=True, check=True)
    return listed.stdout.split()


def copy_python(usr: Path) -> None:
    """Copy Debian's Python, without its larger parts, and the libraries that it loads."""
    python = Path("/usr/bin/python3").resolve()
    if not python.exists():
        pytest.skip("this machine has no python3 of its own")
    linked = subprocess.run(["ldd", python], capture_output=True, text=True, check=True).stdout
    libraries = [Path(word) for word in linked.split() if word.startswith("/")]
    files = [python, *libraries, *map(Path, ("/usr/bin/true", "/usr/bin/env"))]
    for file in files:
        place = usr / str(file).removeprefix("/usr/").removeprefix("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    (usr / "bin/python3").symlink_to(python.name)
    library = Path("usr/lib") / python.name
    left_out = shutil.ignore_patterns(
        "test", "idlelib", "lib2to3", "ensurepip", "__pycache__", "dist-packages", "config-*"
    )
    shutil.copytree("/" / library, usr / library.relative_to("usr"), ignore=left_out, symlinks=True)


MANY = 200
STARTS_MANY = f"""
import sys, time
from concurrent.futures import ThreadPoolExecutor
from grpo_mp.sandbox.sandboxes import Sandboxes

sandboxes = Sandboxes("tests")

def begin(number):
    sandbox = sandboxes.start()
    return sandbox, sandbox.exec(["sh", "-c", f"sleep 3600 & echo {{number}}"], timeout_s=600.0).stdout

with ThreadPoolExecutor({MANY}) as threads:
    begun = list(threads.map(begin, range({MANY})))
print(*(said.strip() for _, said in begun), flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("sandboxes")
def test_many_sandboxes_answer_at_a_time_and_end_with_a_killed_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_MANY], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout
            assert owner.stdout.readline().split() == [str(number) for number in range(MANY)]
            inside = psutil.Process(owner.pid).children(recursive=True)
            assert sum(process.name() == "sleep" for process in inside) == MANY
        finally:
            owner.kill()
    assert not psutil.wait_procs(inside, timeout=120)[1]
