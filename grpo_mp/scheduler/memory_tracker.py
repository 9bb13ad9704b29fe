"""Host and device memory of each phase, as measured on this rank."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from grpo_mp import platform


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes at the end of a phase, and the highest of the device inside it; 0 for the device on a CPU."""

    host_bytes: int
    device_bytes: int
    peak_device_bytes: int


class MemoryTracker:
    """The largest memory usage of each phase since the last `take`."""

    def __init__(self) -> None:
        self._phases: dict[str, MemoryUsage] = {}

    def end(self, phase: str) -> None:
        """Record the usage of the phase that ends now, its peak since `platform.reset_peak_device_bytes`."""
        usage = MemoryUsage(platform.host_bytes(), torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        self._phases[phase] = largest([usage, self._phases.get(phase, usage)])

    def take(self) -> dict[str, MemoryUsage]:
        """Return the usage by phase since the last call, and forget it."""
        usages, self._phases = self._phases, {}
        return usages


def largest(usages: Iterable[MemoryUsage]) -> MemoryUsage:
    """Take the maximum of each field; needs at least one usage."""
    first, *rest = usages
    for other in rest:
        first = replace(first, **{name: max(value, getattr(other, name)) for name, value in vars(first).items()})
    return first
