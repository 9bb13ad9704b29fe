"""Tie the lifetime of processes to that of their parents with prctl(2), and write stacks on a signal."""

import ctypes
import faulthandler
import gc
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LAUNCHER_PID = "GRPO_MP_LAUNCHER_PID"  # environment variable: id of the process that started this rank
WATCH_INTERVAL_S = 0.5
DUMP_SIGNAL = signal.SIGUSR2  # ranks and engine processes write their stacks on this signal
# Environment variables that user programs get. Other variables may hold secrets, such as keys of trackers and judges.
SHARED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "TMPDIR"),
    *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE"),
)


def shared_environment(variables: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment for a user's program: SHARED_VARIABLES and `variables`."""
    return {name: os.environ[name] for name in (*SHARED_VARIABLES, *variables) if name in os.environ}


def prctl(option: int, value: int) -> None:
    """Call prctl(2) for this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def with_descendants(command: Sequence[str], folder: str = "") -> list[str]:
    """Return a command line that runs `command`, and kills all its descendants when it exits or on SIGTERM.

    If the starting process ends, all are killed within a second. Finally `folder` is removed, if given. The exit status
    is that of `command`, or 127 if it cannot be started.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), folder, *command]


def begin_slow_imports() -> None:
    """End with the launcher from now on; until `command_line.command` do not collect garbage, and let Ctrl-C kill.

    Collection would take a fifth of the time of the imports, during which Ctrl-C would print a traceback.
    """
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_launcher()


def end_with_launcher() -> None:
    """Ask the kernel to kill this rank when its launcher (torchrun or `grpo-mp train --ranks`) ends.

    Otherwise the rank would keep running beside the ranks of the next job. Exits if the launcher has already ended.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if _launcher_is_gone():
            raise SystemExit(128 + signal.SIGKILL)


def _launcher_is_gone() -> bool:
    parent = os.getppid()
    if launcher := os.environ.get(LAUNCHER_PID):
        return parent != int(launcher)
    # torchrun does not pass on its process id. Orphans are adopted by process 1, which in a container may be torchrun.
    return parent == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes()


def write_stacks_on_signal(folder: Path) -> None:
    """Install a handler of DUMP_SIGNAL that writes the stacks of all threads to `folder`, also in forked children."""

    def register() -> None:
        with suppress(FileNotFoundError):  # the folder is removed when the engine ends
            file = stacks_file(folder, os.getpid()).open("w")
            faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)

    register()
    os.register_at_fork(after_in_child=register)


def stacks_file(folder: Path, pid: int) -> Path:
    """Return the path that a process writes its stacks to, see `write_stacks_on_signal`."""
    return folder / f"stacks_{pid}.txt"


def catches_dump_signal(status: str) -> bool:
    """Return whether a process handles DUMP_SIGNAL, which would otherwise kill it. `status`: its /proc/PID/status."""
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (DUMP_SIGNAL - 1) & 1)


def _kill_descendants() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in children.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _run(starter: int, folder: str, command: Sequence[str]) -> None:
    """Run `command` as described in `with_descendants`. `starter`: id of the parent process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    ignored = (signal.SIGINT, signal.SIGUSR1)
    watched = {signal.SIGTERM, signal.SIGCHLD}
    for number in ignored:  # the starting process handles these signals
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    status = None
    if not child:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    # Poll, because PR_SET_PDEATHSIG acts when the starting thread ends, not when its process ends.
    while status is None and os.getppid() == starter:
        signalled = signal.sigtimedwait(watched, WATCH_INTERVAL_S)
        if signalled and signalled.si_signo == signal.SIGTERM:
            break
        while status is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else None
    _kill_descendants()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    if status is None:
        sys.exit(128 + signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
