"""Start the ranks of one machine.

Uses torch's launcher like torchrun, with these differences: no tracebacks are printed, so that the failing rank's error
is the last line; the exit status is that of the failing rank; signals are forwarded to all ranks, so that the ranks can
save; the store and the ranks' sockets listen on loopback, those of torchrun on all networks without authentication;
without a GPU the ranks are forks of the launcher, which imports their modules once.
"""

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from grpo_mp import platform
from grpo_mp.distributed.rendezvous import LOOPBACK, OWN_NETWORK
from grpo_mp.trainer.exit import end_process
from grpo_mp.utils.errors import INTERRUPT_STATUS
from grpo_mp.utils.processes import LAUNCHER_PID, end_with_launcher

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDARY_EXITS = (1, -signal.SIGTERM)  # ranks that lost a peer, or that the launcher ended after a failure
STORE_LIMIT_S = 600
INTERRUPT_LIMIT_S = 25  # from Ctrl-C until ranks are killed; the launcher kills 30 s after the first rank ended


def start_ranks(ranks: int, arguments: Sequence[str], module: str) -> int:
    """Run `main` of a module on `ranks` ranks until all end; return 0, or the exit status of the first that failed."""
    command = [sys.executable, "-u", "-m", module]
    if not platform.on_cuda():  # whose driver does not survive a fork
        import_module(module)
        api.get_subprocess_handler = ForkedRank  # type: ignore[assignment]
        command = [module]
    gc.freeze()  # collections need not walk through the objects of the imports, nor copy their memory in a fork
    gc.enable()  # `begin_slow_imports` disabled it
    os.environ.update(OWN_NETWORK | {LAUNCHER_PID: str(os.getpid())})
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    for number in FORWARDED_SIGNALS:
        signal.signal(number, _forward_signal)
    signal.signal(signal.SIGALRM, _kill_ranks)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=LOOPBACK,
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    rendezvous_handler_registry.register(LOOPBACK, LoopbackRendezvous)
    try:
        elastic_launch(config, command[0])(*command[1:], *arguments)
    except ChildFailedError as error:
        return _exit_status(error.failures)
    finally:
        gc.unfreeze()  # extension modules report what is not collected at the exit
    return 0


class ForkedRank(SubprocessHandler):
    """Handler of a rank that is a fork of this process, in place of a new interpreter."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return Fork(partial(_run_rank, *args, environment=env))


class Fork(subprocess.Popen[bytes]):
    """A child process that calls a function, in place of a program."""

    def __init__(self, function: Callable[[], NoReturn]) -> None:
        self._function = function
        super().__init__(())

    def _execute_child(self, *_: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise the child would write the buffer again
        self.pid = os.fork()
        if not self.pid:
            try:
                self._function()
            finally:
                os._exit(1)  # an error must not go on in the launcher's code


def _run_rank(module: str, *arguments: str, environment: Mapping[str, str]) -> NoReturn:
    """Run `main` of a module in this fork of the launcher like `python -u -m`, and end the process."""
    os.setsid()  # torch signals the group of a rank
    os.environ.update(environment)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)  # not the launcher's handler
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    error = None
    try:
        end_with_launcher()
        import_module(module).main(arguments)
    except BaseException as caught:  # noqa: BLE001 - `end_process` shows it
        error = caught
    end_process(error, joins_threads=True)


class LoopbackRendezvous(StaticTCPRendezvous):
    """Rendezvous of a single node whose store listens on loopback only."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        super().__init__(LOOPBACK, listener.getsockname()[1], 0, 1, parameters.run_id, STORE_LIMIT_S)
        self._store = dist.TCPStore(
            self.master_addr,
            self.master_port,
            is_master=True,
            timeout=self.timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return LOOPBACK


def _exit_status(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit status of the job; report a rank that was ended by a signal."""
    rank, failure = min(failures.items(), key=lambda item: (item[1].exitcode in SECONDARY_EXITS, item[1].timestamp))
    if failure.exitcode > 0:
        return failure.exitcode  # the rank has printed its error
    sys.stderr.write(f"error: rank {rank} was ended by {failure.signal_name()}\n")
    return 128 - failure.exitcode


def _forward_signal(number: int, frame: FrameType | None) -> None:
    for rank in psutil.Process().children():
        rank.send_signal(number)
    if number == signal.SIGINT:
        signal.alarm(INTERRUPT_LIMIT_S)


def _kill_ranks(number: int, frame: FrameType | None) -> None:
    # A rank that waits in C++ for another, at the store or in a collective, cannot handle Ctrl-C.
    for rank in psutil.Process().children():
        rank.kill()
    sys.stderr.write(f"stopped by Ctrl-C; ranks that had not ended within {INTERRUPT_LIMIT_S} s were killed\n")
    raise SystemExit(INTERRUPT_STATUS)
