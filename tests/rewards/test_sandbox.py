"""Hostile programs, run for real. Where the kernel gives no namespaces, only what limits can hold is asked for."""

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from grpo_mp.rewards import sandbox as sandbox_module
from grpo_mp.rewards.sandbox import Outcome, Sandbox
from grpo_mp.rewards.settings import CodeConfig
from grpo_mp.utils.errors import UserError

LEAVES_A_PROCESS = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
time.sleep(0.3)
"""
SEARCH_FOR_TOKENS = """
import gc, hashlib, re, sys
def search():
    held, frame = [], sys._getframe()
    while frame:
        held.append({**frame.f_locals, **frame.f_globals})
        frame = frame.f_back
    held += [one for one in gc.get_objects() if isinstance(one, (dict, list, tuple))]
    return {token for one in held for value in (one.values() if isinstance(one, dict) else one)
            if isinstance(value, (str, bytes)) for token in re.findall(rb"[0-9a-f]{32}", value.encode(errors="replace")
            if isinstance(value, str) else value)}
"""
FAILING_TEST = "raise AssertionError('reached')"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox(CodeConfig(output_bytes=2**20, processes=8))
    except UserError as error:
        pytest.skip(f"no namespaces: {error}")


@pytest.fixture
def run(sandbox: Sandbox) -> Callable[..., Outcome]:
    """Runs a program with tests; the limit leaves room for a busy machine."""

    def call(program: str, tests: str | None = "", timeout_s: float = 20.0, stdin: str = "") -> Outcome:
        return sandbox.run(program, tests, stdin, timeout_s)

    return call


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os; os.kill(os.getpid(), 9)",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'passed')\n    except OSError: pass\nos._exit(0)",
        "print('passed'); print('{\"passed\": true}'); import sys; sys.stdout.flush(); sys.exit(0)",
        "import threading, os; threading.Thread(target=lambda: os._exit(0)).start()",
        "import atexit, os; atexit.register(os._exit, 0)",
        "import os; os.execv('/bin/true', ['true'])",
        "import os, sys\nif os.fork(): os.wait()\nos._exit(0)",
        "import sys; sys.excepthook = lambda *_: None",
        "import builtins; builtins.AssertionError = type('E', (BaseException,), {'__init__': lambda *_: exit(0)})",
        "import os; os.write = os._exit = print",
        "import sys; sys.modules['__main__'].__dict__['AssertionError'] = SystemExit",
    ],
)
def test_a_program_that_leaves_early_or_says_passed_has_failed(program: str, run: Callable[..., Outcome]) -> None:
    assert not run(program, FAILING_TEST).passed


def test_leaving_inside_a_test_is_a_failure(run: Callable[..., Outcome]) -> None:
    for leave in ("os._exit(0)", "exit(0)"):
        assert not run(f"import os\ndef f(x): {leave}", "assert f(1) == 2").passed
    assert run("def f(x): return 2", "assert f(1) == 2").passed


def test_no_variable_holds_the_token_of_the_verdict(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "0123456789abcdef" * 2
    monkeypatch.setattr(sandbox_module.secrets, "token_hex", lambda _: token)
    program = f"{SEARCH_FOR_TOKENS}\nknown = {hashlib.sha256(token.encode()).hexdigest()!r}\nearly = search()"
    not_found = "assert known not in {hashlib.sha256(token).hexdigest() for token in early | search()}"
    assert run(program, not_found).passed
    assert not run(f"{program}\nheld = '{token}'", not_found).passed


def test_an_endless_program_ends_at_its_limit(run: Callable[..., Outcome]) -> None:
    for program in (
        "while True: pass",
        "import time; time.sleep(3600)",
        "import signal, time\n"
        "for n in range(1, 30):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: time.sleep(1)",
    ):
        assert not run(program, "", 0.5).passed


def test_a_fork_bomb_stays_small(run: Callable[..., Outcome]) -> None:
    program = """
import os, time
forks = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        forks += 1
    except OSError:
        break
"""
    assert run(program, "assert 0 < forks < 8, forks").passed


def test_memory_is_limited(run: Callable[..., Outcome]) -> None:
    assert run("try:\n    bytearray(2**30)\nexcept MemoryError:\n    stopped = True", "assert stopped").passed


def test_output_is_limited_and_files_too(run: Callable[..., Outcome]) -> None:
    outcome = run("import sys\nwhile True: print('x' * 10000)", None)
    assert not outcome.passed
    assert len(outcome.output) <= 2**20
    fill_folder = (
        "n = 0\ntry:\n    while n < 999:\n        open(f'f{n}', 'wb').write(bytes(2**20)); n += 1\nexcept OSError: pass"
    )
    assert run(fill_folder, "assert 4 < n < 17, n").passed


def test_nothing_outside_can_be_written(run: Callable[..., Outcome], tmp_path: Path) -> None:
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
    assert run(program, "assert written == [] and open('own').read() == 'mine', written").passed
    assert not [place for place in places if (Path(place) / "grpo_mp_hostile").exists()]


def test_nothing_outside_can_be_read(
    run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    (tmp_path / "secret").write_text("hunter2")
    program = f"""
import os
found = dict(os.environ)
seen = [p for p in ["/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/self/mem", {str(tmp_path / "secret")!r},
                    {__file__!r}] if os.path.exists(p)]
"""
    assert run(program, "assert not seen and 'SECRET_KEY' not in found and 'hunter2' not in str(found), seen").passed


KEYRINGS = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
def keyctl(*arguments): return libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
session, user = -3, -4
def keys(): return keyctl(11, session, 0, 0)  # bytes of the list of its keys; -1 without the right to read it
"""
SECRET_KEY = """
from grpo_mp.rewards.sandbox import Sandbox
from grpo_mp.rewards.settings import CodeConfig
libc.syscall(ctypes.c_long(number), ctypes.c_long(1), None)  # a session of its own, as a login has
add_key = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
secret = (b"user", b"token", b"hunter2", ctypes.c_size_t(7), ctypes.c_long(session))
if libc.syscall(ctypes.c_long(add_key), *secret) == -1:
    sys.exit(77)  # forbidden here
assert keys() == 4
assert Sandbox(CodeConfig()).run(PROGRAM, "assert keys() in (0, -1), keys()", "", 20.0).passed
assert keys() == 4
"""


@pytest.mark.usefixtures("sandbox")
def test_keys_of_the_login_are_out_of_reach() -> None:
    """In a process of its own, whose session keyring is changed."""
    source = f"PROGRAM = {KEYRINGS!r}\n{KEYRINGS}\n{SECRET_KEY}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip("no keyrings")
    assert done.returncode == 0, done.stderr


def test_the_folder_is_fresh_and_goes_away(
    run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module.tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        assert run("import os; before = os.listdir(); open('left', 'w').write('x')", "assert before == []").passed
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def test_no_network(run: Callable[..., Outcome], listener: socket.socket) -> None:
    program = f"""
import socket
try:
    socket.create_connection({listener.getsockname()}, timeout=2).send(b"hello")
    connected = True
except OSError:
    connected = False
"""
    assert run(program, "assert not connected").passed
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_other_processes_are_out_of_reach(run: Callable[..., Outcome]) -> None:
    program = f"""
import os, signal
reached = []
for pid in {[psutil.Process().pid, psutil.Process().ppid()]} + list(range(2, 400)):
    try:
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
            reached.append(pid)
    except OSError:
        pass
"""
    assert run(program, "assert not reached, reached").passed


def test_a_program_has_no_privileges(run: Callable[..., Outcome]) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
gained = []
for name, call in {
    "setuid": lambda: os.setuid(0),
    "mount": lambda: 1 / (1 + libc.mount(b"tmpfs", b"/program", b"tmpfs", 0, None)),
    "remount": lambda: 1 / (1 + libc.mount(None, b"/usr", None, 32 | 4096, None)),
    "chroot": lambda: os.chroot("/usr"),
    "hostname": lambda: 1 / (1 + libc.sethostname(b"x", 1)),
}.items():
    try:
        call()
        gained.append(name)
    except (OSError, ZeroDivisionError):
        pass
"""
    assert run(program, "assert not gained and os.getuid() == os.geteuid() != 0, gained").passed
    if os.geteuid() == 0:
        assert run("import os", "assert (os.getuid(), os.getgid(), os.getgroups()) == (65534, 65534, [])").passed


@pytest.mark.usefixtures("sandbox")
def test_limits_too_small_for_any_program() -> None:
    with pytest.raises(
        UserError, match=r"an empty program fails under its limits: raise reward\.code\.memory_bytes=9999999"
    ):
        Sandbox(CodeConfig(memory_bytes=9999999))


def test_no_process_stays_behind(run: Callable[..., Outcome]) -> None:
    mark = f"grpo_mp_left_{time.monotonic_ns()}"
    program = LEAVES_A_PROCESS.format(mark=mark)
    assert run(program, "").passed
    assert not run(program + "time.sleep(60)", "", 1.0).passed
    assert not processes_with(mark)


def processes_with(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]


def test_input_and_status(run: Callable[..., Outcome]) -> None:
    assert run("print(input()[::-1])", None, stdin="abc\n") == Outcome(True, "cba")
    assert run("print(input()); 1/0", None, stdin="abc\n") == Outcome(False, "abc")
    assert run("try: input()\nexcept EOFError: print('end')", None) == Outcome(True, "end")


def test_libraries_and_threads_work(run: Callable[..., Outcome]) -> None:
    program = """
import collections, dataclasses, numpy, threading
@dataclasses.dataclass
class Point: x: int
def total(values): return int(numpy.array(values).sum())
thread = threading.Thread(target=print); thread.start(); thread.join()
"""
    assert run(program, "assert total([1, 2]) == 3 and Point(1) == Point(1)").passed


OWNER = """
from grpo_mp.rewards.sandbox import Sandbox
from grpo_mp.rewards.settings import CodeConfig
sandbox = Sandbox(CodeConfig())
print("an empty program has run", flush=True)
sandbox.run("import time; time.sleep(300)", None, "", 300.0)
"""


@pytest.mark.usefixtures("sandbox")  # where there are namespaces
def test_a_program_ends_with_the_process_that_wanted_it() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        assert owner.stdout.readline()
        deadline, process = time.monotonic() + 60, psutil.Process(owner.pid)
        while len(jailed := process.children(recursive=True)) < 2:  # the monitor, and the program
            assert time.monotonic() < deadline
            time.sleep(0.05)
        owner.kill()
    _, left = psutil.wait_procs(jailed, timeout=20)
    assert left == []


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that refuses namespaces: the jail asks for one that does not exist."""
    jail = tmp_path / "jail.py"
    jail.write_text(sandbox_module.JAIL.read_text().replace('_libc("unshare", ', '_libc("unshare", -1 | '))
    monkeypatch.setattr(sandbox_module, "JAIL", jail)


@pytest.mark.usefixtures("no_namespaces")
def test_without_namespaces_it_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^reward\.code\.isolation: .* no namespaces of their own \(.*unshare: Invalid"
    ):
        Sandbox(CodeConfig())
    deadline = time.monotonic() + 60
    while processes_with(str(tmp_path / "jail.py")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("no_namespaces")
def test_without_namespaces_best_effort_keeps_the_limits() -> None:
    if os.geteuid() == 0:
        with pytest.raises(UserError, match=r"programs cannot be started here .*: run as a user other than root"):
            Sandbox(CodeConfig(isolation="best_effort"))
        return
    sandbox = Sandbox(CodeConfig(isolation="best_effort"))
    assert not sandbox.isolated
    assert not sandbox.run("while True: pass", FAILING_TEST, "", 0.5).passed
    assert not sandbox.run("import os; os._exit(0)", FAILING_TEST, "", 20.0).passed
    assert sandbox.run("x = 1", "assert x", "", 20.0).passed
    mark = f"grpo_mp_left_{time.monotonic_ns()}"
    assert sandbox.run(LEAVES_A_PROCESS.format(mark=mark), "", "", 20.0).passed
    assert not processes_with(mark)
