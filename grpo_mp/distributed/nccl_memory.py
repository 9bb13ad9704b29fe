"""Memory of this rank's NCCL communicators, given back to the device while engines generate.

NCCL suspends a communicator: it copies its buffers to the host and frees them, and keeps addresses and connections;
those to other nodes, and NVLink SHARP's, stay. Communicators are neither ended nor made anew.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.communicators import PIPELINE

FIRST_NCCL = (2, 29, 7)  # with ncclCommSuspend


class NcclMemory:
    """Suspends and resumes communicators."""

    def __init__(self, layout: LayoutConfig) -> None:
        """Prepare for a layout: with a virtual pipeline the communicators of stages stay as they are.

        Stages then send pair by pair, each pair with a communicator of its own, in one group. To suspend one is to wait
        for the other rank; torch goes through them in an order that may differ by rank.
        """
        self._left_out = {PIPELINE} if layout.virtual_pipeline else set()
        self._suspended: list[Any] = []

    def move(self, onload: bool) -> None:
        """Resume what is suspended, or suspend all communicators."""
        if onload:
            for backend in self._suspended:
                backend.resume()
            self._suspended = []
            return
        for backend in self._backends():
            backend.suspend()
            self._suspended.append(backend)

    def _backends(self) -> Iterator[Any]:
        """Yield the groups' communicators in an order that all ranks share, so that none waits for another."""
        for member in parallel_state._global_process_group_list or ():
            group: Any = member or dist.group.WORLD  # Megatron names the default group None
            if dist.get_backend(group) != "nccl" or group.group_desc in self._left_out:
                continue
            backend: Any = group._get_backend(torch.device("cuda"))
            if backend._is_initialized():  # the group was used
                yield backend


def can_suspend(version: tuple[int, ...], environment: Mapping[str, str]) -> bool:
    """Return whether this NCCL frees the memory of communicators: a new one that is not told to allocate as before."""
    return version >= FIRST_NCCL and environment.get("NCCL_CUMEM_ENABLE") != "0"
