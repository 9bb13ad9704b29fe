"""Claims of free TCP ports that no other run on this host will choose.

SGLang binds its ports many seconds after they were chosen. Until then a name in the kernel's abstract socket namespace
reserves each port; it disappears when its process ends.
"""

import os
import random
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from grpo_mp.utils.errors import UserError

FIRST_PORT = 15000
JOB_PORTS = "GRPO_MP_PORTS"  # "20001-20199": ports that the batch script reserves for this job
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 2000


@dataclass(frozen=True)
class PortClaim:
    """Consecutive ports, reserved until `release` or the end of this process."""

    ports: range
    reservations: ExitStack

    @property
    def port(self) -> int:
        return self.ports[0]

    def release(self) -> None:
        self.reservations.close()


def claim_ports(count: int = 1) -> PortClaim:
    """Claim `count` consecutive ports from the job's range, or else from below the kernel's ephemeral range."""
    port_range = _port_range()
    starts = range(port_range.start, port_range.stop - count + 1, count)
    for first in random.SystemRandom().sample(starts, min(ATTEMPTS, len(starts))):
        ports = range(first, first + count)
        if reservations := _reserve_all(ports):
            return PortClaim(ports, reservations)
    raise UserError(
        f"no {count} free ports in a row between {port_range[0]} and {port_range[-1]} on this host: stop the processes "
        "that use them"
    )


def own_address() -> str:
    """Return this node's address on the route to MASTER_ADDR."""
    master = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, int(os.environ["MASTER_PORT"])))  # connecting a UDP socket sends nothing
        address: str = probe.getsockname()[0]
    return master if address.startswith("127.") else address  # a node may resolve its own name to loopback


def _port_range() -> range:
    first, last = map(int, os.environ.get(JOB_PORTS, f"{FIRST_PORT}-{_last_port()}").split("-"))
    return range(first, last + 1)


def _last_port() -> int:
    return int(EPHEMERAL_RANGE.read_text().split()[0]) - 1 if EPHEMERAL_RANGE.exists() else 32767


def _reserve_all(ports: range) -> ExitStack | None:
    with ExitStack() as reservations:
        try:
            for port in ports:
                reservation = reservations.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                reservation.bind(f"\0grpo_mp-port-{port}")
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
        except OSError:
            return None
        return reservations.pop_all()
