"""Rendezvous of the ranks of a job, and failure reports through its store."""

import datetime
import os

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.utils.errors import UserError

# Number of collectives that torch's flight recorder keeps on each rank, for `grpo-mp doctor stuck`.
RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
RECORDED_COLLECTIVES = 1000
LOOPBACK = "127.0.0.1"
OWN_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # used if all ranks are on this machine
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
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        for name, value in OWN_NETWORK.items():
            os.environ.setdefault(name, value)
    try:
        return next(dist.rendezvous("env://", timeout=timeout))
    except (dist.DistError, OSError) as error:
        host, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
        if "EADDRINUSE" in str(error):
            raise UserError(f"MASTER_PORT={port} of {host} is taken: choose another, for every rank") from error
        reason = str(error).partition("\n")[0]
        raise UserError(f"rank {rank} cannot reach the rendezvous at {host}:{port}: {reason}") from error


def has_failed(store: dist.Store) -> bool:
    """Return whether any rank has reported a failure."""
    return bool(store.check([FAILURE]))


def is_first_failure(store: dist.Store, key: str) -> bool:
    """Return whether this rank is the first to call with `key`, and must therefore report its error."""
    try:
        return store.add(key, 1) == 1
    except RuntimeError:
        return True  # without the store, duplicate reports are better than none
