"""Claims on free TCP ports that no other part of this program, and no other run on this host, will choose.

SGLang binds its ports many seconds after they were chosen. Until then a name in the kernel's abstract socket namespace
reserves each one: every process of the host sees it, and it goes when the process that bound it ends.
"""

import os
import random
import socket
from pathlib import Path

import psutil

from grpo_mp.errors import UserError

FIRST_PORT = 15000
JOB_PORTS = "GRPO_MP_PORTS"  # "20001-20199": ports that the batch script set apart for this job
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 2000
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # as torch reads it


class PortClaim:
    """Consecutive ports, reserved until `release` or until this process ends. `port` is the first."""

    def __init__(self, port: int, reservations: list[socket.socket]) -> None:
        self.port = port
        self._reservations = reservations

    @property
    def ports(self) -> range:
        """All claimed ports."""
        return range(self.port, self.port + len(self._reservations))

    def release(self) -> None:
        """Let others choose these ports again. Safe to call twice."""
        for reservation in self._reservations:
            reservation.close()


def claim_port() -> PortClaim:
    """Claim a port of the job's own range, else below the range that the kernel uses for outgoing connections.

    Raises UserError when none is free.
    """
    return claim_ports(1)


def claim_ports(count: int) -> PortClaim:
    """Claim `count` consecutive ports, as `claim_port` does.

    Claims of one size begin at multiples of it, so that the gaps between them are never too small.
    """
    port_range = _port_range()
    starts = range(port_range.start, port_range.stop - count + 1, count)
    for first in random.SystemRandom().sample(starts, min(ATTEMPTS, len(starts))):
        reservations = _reserve_all(range(first, first + count))
        if reservations:
            return PortClaim(first, reservations)
    name = "port" if count == 1 else f"{count} ports in a row"
    raise UserError(f"no free {name} between {port_range[0]} and {port_range[-1]} on this host: end what holds them")


def own_address() -> str:
    """Find the address at which the job's other nodes reach this one: on the network that leads to MASTER_ADDR.

    GLOO_SOCKET_IFNAME names another network, for a node that knows its own name as loopback. Raises UserError where
    there is no such network here.
    """
    if interfaces := os.environ.get(GLOO_INTERFACE):
        return _address_on(interfaces.split(",")[0])
    master = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as read_capabilities:
        read_capabilities.connect((master, int(os.environ["MASTER_PORT"])))  # sends nothing
        address: str = read_capabilities.getsockname()[0]
    return master if address.startswith("127.") else address  # the master's node may know its own name as loopback


def _address_on(interface: str) -> str:
    addresses = {
        name: address.address
        for name, interface_addresses in psutil.net_if_addrs().items()
        for address in interface_addresses
        if address.family == socket.AF_INET
    }
    if interface not in addresses:
        raise UserError(
            f"{GLOO_INTERFACE}={interface}: no network here with that name: choose from {', '.join(addresses)}"
        )
    return addresses[interface]


def _port_range() -> range:
    job_ports = os.environ.get(JOB_PORTS)
    if job_ports is None:
        return range(FIRST_PORT, _last_port() + 1)
    first, dash, last = job_ports.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise UserError(f"{JOB_PORTS}={job_ports}: write two ports, such as 20001-20199")
    return range(int(first), int(last) + 1)


def _last_port() -> int:
    return int(EPHEMERAL_RANGE.read_text().split()[0]) - 1 if EPHEMERAL_RANGE.exists() else 32767


def _reserve_all(ports: range) -> list[socket.socket]:
    """Reserve all the ports, or none."""
    reservations: list[socket.socket] = []
    for port in ports:
        reservation = _reserve(port)
        if reservation:
            reservations.append(reservation)
        if reservation is None or not _is_free(port):
            for reserved in reservations:
                reserved.close()
            return []
    return reservations


def _reserve(port: int) -> socket.socket | None:
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reservation.bind(f"\0grpo_mp-port-{port}")
    except OSError:
        reservation.close()
        return None
    return reservation


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as read_capabilities:
        read_capabilities.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            read_capabilities.bind(("", port))
        except OSError:
            return False
    return True
