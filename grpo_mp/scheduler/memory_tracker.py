"""Host and device memory of each phase, as measured on this rank."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from grpo_mp import platform


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes at the end of a phase, and the highest of the device inside it."""

    host_bytes: int
    device_bytes: int
    peak_device_bytes: int


class MemoryTracker:
    """The largest footprint of each phase since the last `take`."""

    def __init__(self) -> None:
        self._phases: dict[str, MemoryUsage] = {}

    def begin(self) -> None:
        """Start measuring the peak of a phase."""
        platform.reset_peak_device_bytes()

    def end(self, phase: str) -> None:
        """Record the phase that ends now."""
        found = MemoryUsage(platform.host_bytes(), platform.device_bytes(), platform.peak_device_bytes())
        self._phases[phase] = largest([found, self._phases.get(phase, found)])

    def take(self) -> dict[str, MemoryUsage]:
        """Footprints by phase since the last call."""
        taken, self._phases = self._phases, {}
        return taken


def largest(footprints: Iterable[MemoryUsage]) -> MemoryUsage:
    """Field by field the largest; needs at least one."""
    first, *rest = footprints
    for other in rest:
        first = replace(first, **{name: max(value, getattr(other, name)) for name, value in vars(first).items()})
    return first
