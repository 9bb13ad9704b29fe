"""Tie the life of one process to that of another, by what Linux offers: prctl(2); show its stacks on a signal."""

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LAUNCHER_PID = "GRPO_MP_LAUNCHER_PID"  # of the process that started this rank: it may end before that asks for it
DESCENDANTS = "--with-descendants"
DUMP_SIGNAL = signal.SIGUSR2  # a rank or an engine's process then writes what it does
# Variables that programs beside a rank find; others of the run may be secrets, such as keys of trackers and judges.
SHARED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "TMPDIR"),
    *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE"),
)


def shared_environment(variables: Sequence[str] = ()) -> dict[str, str]:
    """Return what a program finds that runs what a user wrote: SHARED_VARIABLES, and those that are named."""
    return {name: os.environ[name] for name in (*SHARED_VARIABLES, *variables) if name in os.environ}


def prctl(option: int, value: int) -> None:
    """Set an option of this process. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def with_death_signal(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one, which is killed when the thread that starts it has ended."""
    return [sys.executable, __file__, *command]


def with_descendants(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one and waits; it and all that it has started are killed when it ends.

    So they are when the thread that starts it has ended, or on SIGTERM. The status is the other's own. Raises nothing:
    one that cannot be started says so on stderr, with status 127.
    """
    return [sys.executable, "-I", "-S", __file__, DESCENDANTS, str(os.getpid()), *command]


def end_with_launcher() -> None:
    """Let a rank that torchrun or `grpo-mp train --ranks` started be killed when that ends, however it does.

    Otherwise a rank would go on where nobody sees it, beside those of the job that is started in its place. One whose
    launcher has ended before this call exits.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if _launcher_is_gone():
            raise SystemExit(128 + signal.SIGKILL)


def _launcher_is_gone() -> bool:
    """Return whether this process has another parent than the one that started it; torchrun does not say its number."""
    parent = os.getppid()
    if launcher := os.environ.get(LAUNCHER_PID):
        return parent != int(launcher)
    # Who takes orphans is init; in a container torchrun itself may be process 1.
    return parent == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes()


def write_stacks_on_signal(folder: Path) -> None:
    """Let DUMP_SIGNAL append the Python stacks of all threads of this process, or a fork of it, to its file there."""

    def register() -> None:
        with suppress(FileNotFoundError):  # the folder goes when the engine ends
            file = stacks_file(folder, os.getpid()).open("w")
            faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)

    register()
    os.register_at_fork(after_in_child=register)


def stacks_file(folder: Path, pid: int) -> Path:
    """Return the file of `write_stacks_on_signal` of a process."""
    return folder / f"stacks_{pid}.txt"


def catches_dump_signal(status: str) -> bool:
    """Return whether a process whose /proc/PID/status is given has a handler for DUMP_SIGNAL: else it would end."""
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (DUMP_SIGNAL - 1) & 1)


def _kill_descendants() -> None:
    """Kill all children of this process, and those that it inherits from them, until there are none."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in children.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _run(starter: int, command: Sequence[str]) -> None:
    """Do what `with_descendants` says, as a process of one thread whose parent is `starter`."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:  # it ended before
        return
    child, status = os.fork(), None
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    try:
        while status is None:
            ended, code = os.wait()
            status = code if ended == child else None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_descendants()
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    if sys.argv[1] == DESCENDANTS:
        _run(int(sys.argv[2]), sys.argv[3:])
    else:  # what `with_death_signal` returns; the setting outlives the exec
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execvp(sys.argv[1], sys.argv[1:])
