"""Rendezvous of the ranks of a job, and failure reports through its store."""

import datetime
import errno
import os
import socket

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.utils.errors import UserError

# Number of collectives that torch's flight recorder keeps on each rank, for `grpo-mp doctor stuck`.
RECORDER_VARIABLE, RECORDED_COLLECTIVES = "TORCH_FR_BUFFER_SIZE", 1000
LOOPBACK = "127.0.0.1"
OWN_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # used if all ranks are on this machine
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # 'True': torchrun's agent serves the store
FAILURE = "ended"  # key in the store, set when a rank has failed


def rendezvous(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Select this rank's device; return the job's store, this rank, and the world size.

    A job of one rank uses an in-process store and opens no socket.
    """
    os.environ.setdefault(RECORDER_VARIABLE, str(RECORDED_COLLECTIVES))
    if platform.on_cuda():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ["WORLD_SIZE"] == "1":
        return dist.HashStore(), 0, 1
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if one_node:
        for name, value in OWN_NETWORK.items():
            os.environ.setdefault(name, value)
    try:
        if os.environ.get(AGENT_STORE) == "True":
            return next(dist.rendezvous("env://", timeout=timeout))
        return _store(LOOPBACK if one_node else os.environ["MASTER_ADDR"], timeout)
    except (dist.DistError, OSError) as error:
        host, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
        if "EADDRINUSE" in str(error) or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
            raise UserError(f"MASTER_PORT={port} of {host} is taken: choose another, for every rank") from error
        reason = str(error).partition("\n")[0]
        raise UserError(f"rank {rank} cannot reach the rendezvous at {host}:{port}: {reason}") from error


def _store(host: str, timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Join the rendezvous as torch's `env://` does.

    Rank 0 serves the store only on the network of `host`, whereas torch would listen on all interfaces.
    """
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


def _listener(host: str, port: int) -> socket.socket | None:
    """Listen at the address of `host`, or return None if other nodes may resolve `host` differently.

    Raises OSError if the port is taken.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = {str(address[0]): family for family, _, _, _, address in found}
    ((address, family), *others) = addresses.items()
    # A node may resolve its own name to 127.0.1.1 or to several addresses, but torch takes a single socket.
    if others or (address.startswith("127.") and address != host):
        return None
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return None  # not an address of this node, e.g. behind NAT


def has_failed(store: dist.Store) -> bool:
    """Return whether any rank has reported a failure."""
    return bool(store.check([FAILURE]))


def is_first_failure(store: dist.Store, key: str) -> bool:
    """Return whether this rank is the first to call with `key`, and must therefore report its error."""
    try:
        return store.add(key, 1) == 1
    except RuntimeError:
        return True  # without the store, duplicate reports are better than none
