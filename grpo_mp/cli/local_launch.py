"""Start the ranks of one machine.

torchrun starts the same program. This front end over torch's own launcher prints no traces, so that the failing rank's
error is the last line; it exits with that rank's status, and forwards signals to every rank, which may save first. Its
store and its ranks' sockets are on loopback: torchrun's listen on every network, and ask for no key.
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
from grpo_mp.utils.processes import LAUNCHER_PID

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDARY_EXITS = (1, -signal.SIGTERM)  # of ranks that lost a peer, or that the launcher ended after one failed
STORE_LIMIT_S = 600


def start_ranks(ranks: int, arguments: Sequence[str], module: str) -> int:
    """Run a module on so many ranks until all have ended; return the status of the first that failed, 0 without one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks and engines share the cores
    os.environ.update(OWN_NETWORK | {LAUNCHER_PID: str(os.getpid())})
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    for number in FORWARDED_SIGNALS:
        signal.signal(number, _forward_signal)
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
    """The rendezvous of one node, whose store only this machine reaches."""

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
    """Return the job's exit status; print what no rank could."""
    rank, failure = min(failures.items(), key=lambda item: (item[1].exitcode in SECONDARY_EXITS, item[1].timestamp))
    if failure.exitcode > 0:
        return failure.exitcode  # the rank has said why
    sys.stderr.write(f"error: rank {rank} was ended by {failure.signal_name()}\n")
    return 128 - failure.exitcode


def _forward_signal(number: int, frame: FrameType | None) -> None:
    for rank in psutil.Process().children():
        rank.send_signal(number)
