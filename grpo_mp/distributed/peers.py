"""Detects that a rank is gone while other ranks wait for it outside of a collective."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from grpo_mp.utils.background import BackgroundTask

TAG = 1  # distinguishes these messages from others between two ranks


@contextmanager
def watching_peers(group: dist.ProcessGroup) -> Iterator[Callable[[], None]]:
    """Yield a function that raises RuntimeError if the next rank is gone.

    A thread waits for a message that the next rank sends when its `with` body ends. Each rank watches one other rank;
    the launcher stops all ranks when one has failed.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    if size == 1:
        yield lambda: None
        return
    message = torch.zeros(1)

    def receive() -> None:
        dist.recv(message, group_src=(rank + 1) % size, group=group, tag=TAG)

    task = BackgroundTask(receive, "watching a peer")
    yield task.check
    dist.send(torch.zeros(1), group_dst=(rank - 1) % size, group=group, tag=TAG)
    task.wait(rank, "waiting for the next rank", None)  # no limit: phase and group have timeouts
