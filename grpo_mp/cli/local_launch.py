"""Start the ranks of one machine.

Uses torch's launcher like torchrun, with these differences: no tracebacks are printed, so that the failing rank's error
is the last line; the exit status is that of the failing rank; signals are forwarded to all ranks, so that the ranks can
save; the store and the ranks' sockets listen on loopback, those of torchrun on all networks without authentication.
"""

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from grpo_mp.distributed.rendezvous import LOOPBACK, OWN_NETWORK
from grpo_mp.utils.errors import INTERRUPT_STATUS
from grpo_mp.utils.processes import LAUNCHER_PID

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDARY_EXITS = (1, -signal.SIGTERM)  # ranks that lost a peer, or that the launcher ended after a failure
STORE_LIMIT_S = 600
INTERRUPT_LIMIT_S = 25  # from Ctrl-C until ranks are killed; the launcher kills 30 s after the first rank ended


def start_ranks(ranks: int, arguments: Sequence[str], module: str) -> int:
    """Run `module` on `ranks` ranks until all end; return 0, or the exit status of the first rank that failed."""
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))  # for a rank, and for its engine on CPUs
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
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        return _exit_status(error.failures)
    return 0


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
