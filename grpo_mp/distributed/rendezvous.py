"""Rendezvous of the ranks of a job."""

import datetime
import os

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.errors import UserError

# How many of its last collectives a rank remembers, in torch's flight recorder: `grpo-mp doctor stuck` reads them.
RECORDER_VARIABLE, RECORDED_COLLECTIVES = "TORCH_FR_BUFFER_SIZE", 1000


def rendezvous(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Select this rank's device and return the job's store, this rank and the world size; one rank needs no socket.

    Raises UserError where the ranks cannot connect.
    """
    os.environ.setdefault(RECORDER_VARIABLE, str(RECORDED_COLLECTIVES))
    if platform.on_cuda():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if os.environ["WORLD_SIZE"] == "1":
        return dist.HashStore(), 0, 1
    try:
        return next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if "EADDRINUSE" in str(error):
            raise UserError(f"MASTER_PORT={port} of {host} is taken: choose another, for every rank") from error
        reason = str(error).partition("\n")[0]
        raise UserError(f"rank {os.environ['RANK']} cannot reach the rendezvous at {host}:{port}: {reason}") from error


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
