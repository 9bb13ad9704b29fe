"""Rendezvous of the ranks of a job."""

import datetime
import errno
import ipaddress
import os
import socket

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.utils.errors import UserError

# How many of its last collectives a rank remembers, in torch's flight recorder: `grpo-mp doctor stuck` reads them.
RECORDER_VARIABLE, RECORDED_COLLECTIVES = "TORCH_FR_BUFFER_SIZE", 1000


LOOPBACK = "127.0.0.1"
OWN_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # of ranks that are all on this machine
AGENT_STORE = (
    "TORCHELASTIC_USE_AGENT_STORE"  # 'True': torchrun's agent serves the store, and did before this rank began
)


def rendezvous(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Select this rank's device and return the job's store, this rank and the world size; one rank needs no socket.

    Sockets of a job on one machine are on loopback from here on, but for the store of torchrun's agent. Raises
    UserError where the ranks cannot connect.
    """
    os.environ.setdefault(RECORDER_VARIABLE, str(RECORDED_COLLECTIVES))
    if platform.on_cuda():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ["WORLD_SIZE"] == "1":
        return dist.HashStore(), 0, 1
    if one_node := os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        for name, value in OWN_NETWORK.items():
            os.environ.setdefault(name, value)
    try:
        if os.environ.get(AGENT_STORE) == "True":
            return next(dist.rendezvous("env://", timeout=timeout))
        return _store(LOOPBACK if one_node else os.environ["MASTER_ADDR"], timeout)
    except (dist.DistError, OSError) as error:
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if "EADDRINUSE" in str(error) or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
            raise UserError(f"MASTER_PORT={port} of {host} is taken: choose another, for every rank") from error
        reason, rank = str(error).partition("\n")[0], os.environ["RANK"]
        known = f" ({host} is {' and '.join(addresses_of(host)) or 'unknown'} here)" if _is_name(host) else ""
        raise UserError(f"rank {rank} cannot reach the rendezvous at {host}:{port}{known}: {reason}") from error


def _store(host: str, timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Return what torch's `env://` does; rank 0 serves the store on the network of `host`, torch would on all."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listener = _listener(host, port) if rank == 0 else None
    store = dist.TCPStore(
        host,
        port,
        size,
        is_master=rank == 0,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach() if listener else None,
    )
    return store, rank, size


def addresses_of(host: str) -> list[str]:
    """Return the addresses by which this node knows `host`, each once; none of an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _listener(host: str, port: int) -> socket.socket | None:
    """Listen at the only address of `host`; None where others may know it by another. Raises OSError for a taken port.

    Torch takes one socket: for several addresses that is torch's own, on every network.
    """
    addresses = addresses_of(host)
    if len(addresses) != 1:
        return None  # which of them another node tries is up to its resolver
    address = ipaddress.ip_address(addresses[0])
    if address.is_loopback and _is_name(host):
        return None  # a node may know its own name as 127.0.1.1
    try:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        return socket.create_server((addresses[0], port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return None  # it is reached by an address that it does not know of


FAILURE = "ended"  # key of the store: a rank of the job has failed


def has_failed(store: dist.Store) -> bool:
    """Return whether a rank has reported its failure."""
    return bool(store.check([FAILURE]))


def is_first_failure(store: dist.Store, key: str) -> bool:
    """Return whether this rank is the first of the job to ask with this key, and so the one that reports its error."""
    try:
        return store.add(key, 1) == 1
    except RuntimeError:
        return True  # the store is gone: two reports are better than none
