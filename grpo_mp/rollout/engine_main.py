"""The process that an engine host starts: `python -m grpo_mp.rollout.engine_main`, arguments in the environment.

It forks before anything heavy is imported. The child becomes the SGLang server, in a process group of its own. The
parent watches it: on SIGTERM, when the server ends, or when the trainer that started it is gone, it kills the entire
group, removes the engine's temporary files and exits with the server's status.
"""

import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress

from grpo_mp.utils.files import ENGINE_SCRATCH
from grpo_mp.utils.processes import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

ARGUMENTS = "GRPO_MP_ENGINE_ARGUMENTS"  # ServerArgs as JSON: by environment, since it holds the engine's key
TRAINER_PID = "GRPO_MP_TRAINER_PID"  # of the process that started this one: it may end before this one asks for it
WATCH_INTERVAL_S = 0.5
TERM_GRACE_S = 1.0  # nothing in an engine is worth saving
REAP_LIMIT_S = 10.0
WATCHED = {signal.SIGTERM, signal.SIGCHLD}


def main() -> None:
    """Run the server until it has ended; exit with its status."""
    trainer = int(os.environ[TRAINER_PID])
    for number in (signal.SIGINT, signal.SIGUSR1):  # for the trainer, which then ends its engines or saves
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    watcher = os.getpid()
    server = os.fork()
    if server == 0:
        _run_server(watcher)
    with suppress(ProcessLookupError):  # it has ended; both make the group, since either may be the first to run
        os.setpgid(server, server)
    status = _wait_for_server(server, trainer)
    _reap_all(server)
    shutil.rmtree(os.environ[ENGINE_SCRATCH], ignore_errors=True)
    sys.exit(status)


def _wait_for_server(server: int, trainer: int) -> int:
    """Wait until the server has ended or must end; return its exit status as a shell shows it."""
    signalled = None
    while os.getppid() == trainer:
        pid, status = os.waitpid(server, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            reason = f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            print(f"engine process ended with {reason}", flush=True)
            return code if code >= 0 else 128 - code
        if signalled and signalled.si_signo == signal.SIGTERM:
            return _terminate(server)
        signalled = signal.sigtimedwait(WATCHED, WATCH_INTERVAL_S)
    return 128 + signal.SIGKILL


def _terminate(server: int) -> int:
    os.kill(server, signal.SIGTERM)  # the server tells its own children
    deadline = time.monotonic() + TERM_GRACE_S
    while time.monotonic() < deadline:
        if os.waitpid(server, os.WNOHANG)[0]:
            break
        signal.sigtimedwait({signal.SIGCHLD}, WATCH_INTERVAL_S)
    return 128 + signal.SIGTERM


def _reap_all(group: int) -> None:
    """Kill what is left of the group and wait for it: orphans of the server are children of this process."""
    deadline = time.monotonic() + REAP_LIMIT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _run_server(watcher: int) -> None:
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the watching process be killed
    if os.getppid() != watcher:  # it was, before
        os._exit(128 + signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    arguments = json.loads(os.environ.pop(ARGUMENTS))

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**arguments))
    sys.exit(0)


if __name__ == "__main__":
    main()
