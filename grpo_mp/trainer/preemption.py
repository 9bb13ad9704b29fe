"""SIGTERM and SIGUSR1 ask the run to save and end; all ranks agree on when."""

import signal
from types import FrameType

import torch
import torch.distributed as dist


class PreemptionHandler:
    """Remembers the signal instead of dying of it."""

    def __init__(self) -> None:
        self._received: int | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._remember)
        # Slurm signals every process of a step. The helpers that a rank starts, those of a save among them, inherit
        # what is blocked, but not what is handled.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def agreed(self, group: dist.ProcessGroup) -> bool:
        """Whether any rank was asked to stop. Every rank must call this."""
        received = self._received is not None or signal.SIGUSR1 in signal.sigpending()
        asked = torch.tensor([received], dtype=torch.int32)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
        return bool(asked.item())

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number
