"""Free TCP ports on loopback that nobody else in this program, or in another run on this host, will choose too.

SGLang binds its ports many seconds after they were chosen. Until then a choice is held by a name in the
kernel's abstract socket namespace: it is seen by every process of the host and goes when the holder ends.
"""

import os
import random
import socket
from pathlib import Path

import psutil

from grpo_mp.errors import UserError

FIRST_PORT = 15000
OF_JOB = "GRPO_MP_PORTS"  # "20001-20199": ports that the batch script set apart for this job
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 2000
INTERFACE = "GLOO_SOCKET_IFNAME"  # as torch reads it


class PortClaim:
    """Chosen ports that follow each other, held until `release` or until this process ends. `port` is the first."""

    def __init__(self, port: int, holders: list[socket.socket]) -> None:
        self.port = port
        self._holders = holders

    @property
    def ports(self) -> range:
        """All of them."""
        return range(self.port, self.port + len(self._holders))

    def release(self) -> None:
        """Let others choose these ports again. Safe to call twice."""
        for holder in self._holders:
            holder.close()


def claim_port() -> PortClaim:
    """Choose a port of the job's own range, else below the range that the kernel uses for outgoing connections.

    Raises UserError when none is free.
    """
    return claim_ports(1)


def claim_ports(count: int) -> PortClaim:
    """Choose `count` ports that follow each other, as `claim_port` does.

    Claims of one size begin at multiples of it, so that the gaps between them are never too small.
    """
    choices = _choices()
    starts = range(choices.start, choices.stop - count + 1, count)
    for first in random.SystemRandom().sample(starts, min(ATTEMPTS, len(starts))):
        holders = _hold_all(range(first, first + count))
        if holders:
            return PortClaim(first, holders)
    what = "port" if count == 1 else f"{count} ports in a row"
    raise UserError(f"no free {what} between {choices[0]} and {choices[-1]} on this host: end what holds them")


def own_address() -> str:
    """How the job's other nodes reach this one: its address on the network that leads to MASTER_ADDR.

    GLOO_SOCKET_IFNAME names another network, for a node that knows its own name as loopback. Raises UserError where
    there is no such network here.
    """
    if interfaces := os.environ.get(INTERFACE):
        return _address_on(interfaces.split(",")[0])
    master = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, int(os.environ["MASTER_PORT"])))  # sends nothing
        address: str = probe.getsockname()[0]
    return master if address.startswith("127.") else address  # the master's node may know its own name as loopback


def _address_on(interface: str) -> str:
    found = {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }
    if interface not in found:
        raise UserError(f"{INTERFACE}={interface}: no network here with that name: choose from {', '.join(found)}")
    return found[interface]


def _choices() -> range:
    of_job = os.environ.get(OF_JOB)
    if of_job is None:
        return range(FIRST_PORT, _last_port() + 1)
    first, dash, last = of_job.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise UserError(f"{OF_JOB}={of_job}: write two ports, such as 20001-20199")
    return range(int(first), int(last) + 1)


def _last_port() -> int:
    return int(EPHEMERAL_RANGE.read_text().split()[0]) - 1 if EPHEMERAL_RANGE.exists() else 32767


def _hold_all(ports: range) -> list[socket.socket]:
    """Holders of all the ports, or of none."""
    holders: list[socket.socket] = []
    for port in ports:
        holder = _hold(port)
        if holder:
            holders.append(holder)
        if holder is None or not _is_free(port):
            for held in holders:
                held.close()
            return []
    return holders


def _hold(port: int) -> socket.socket | None:
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0grpo_mp-port-{port}")
    except OSError:
        holder.close()
        return None
    return holder


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
