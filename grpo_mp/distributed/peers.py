"""Notice that a rank is gone while others wait for it without a collective, which would notice by itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from grpo_mp.utils.background import BackgroundTask

TAG = 1  # of these messages among others between two ranks


@contextmanager
def watching_peers(group: dist.ProcessGroup) -> Iterator[Callable[[], None]]:
    """Yield a function that raises RuntimeError if the next rank is gone.

    A thread waits for a message that the next rank sends when its body ends. Each rank watches one other; the launcher
    ends all ranks when one has failed.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        yield lambda: None
        return
    message = torch.zeros(1)

    def receive() -> None:
        dist.recv(message, group_src=(rank + 1) % size, group=group, tag=TAG)

    task = BackgroundTask(receive, "watching a peer")
    yield task.check
    dist.send(torch.zeros(1), group_dst=(rank - 1) % size, group=group, tag=TAG)
    task.wait(rank, "waiting for the next rank", None)  # the phase and the group have limits
