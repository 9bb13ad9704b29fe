"""Memory of this rank's NCCL communicators, freed on the device while engines generate.

NCCL suspends a communicator: it copies the buffers to the host and frees them, but keeps addresses and connections.
Buffers for other nodes and for NVLink SHARP stay.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import PIPELINE

platform.prepare()  # makes Megatron importable without a GPU

from megatron.core import parallel_state  # noqa: E402

FIRST_NCCL = (2, 29, 7)  # first version with ncclCommSuspend


class NcclMemory:
    """Suspends NCCL communicators to free device memory, and resumes them."""

    def __init__(self, layout: LayoutConfig) -> None:
        # With a virtual pipeline, each pair of stages has a communicator in one group. Suspending waits for the other
        # rank, and torch's order of communicators within a group may differ between ranks: this could deadlock.
        self._left_out = {PIPELINE} if layout.virtual_pipeline else set()
        self._suspended: list[Any] = []

    def move(self, onload: bool) -> None:
        """Suspend all NCCL communicators, or resume those that are suspended."""
        if onload:
            for backend in self._suspended:
                backend.resume()
            self._suspended = []
            return
        for backend in self._backends():
            backend.suspend()
            self._suspended.append(backend)

    def _backends(self) -> Iterator[Any]:
        """Yield the groups' NCCL backends in an order common to all ranks, so that suspending cannot deadlock."""
        for member in parallel_state._global_process_group_list or ():
            group: Any = member or dist.group.WORLD  # Megatron names the default group None
            if dist.get_backend(group) != "nccl" or group.group_desc in self._left_out:
                continue
            backend: Any = group._get_backend(torch.device("cuda"))
            if backend._is_initialized():  # the group has a communicator
                yield backend


def can_suspend(version: tuple[int, ...], environment: Mapping[str, str]) -> bool:
    """Return whether this NCCL version frees memory on suspend, and the environment does not prevent it.

    Without cuMem allocation nothing is freed, and torch's second NCCL backend has no function to suspend.
    """
    prevented = environment.get("NCCL_CUMEM_ENABLE") == "0" or environment.get("TORCH_DIST_USE_NCCL2") == "1"
    return version >= FIRST_NCCL and not prevented
