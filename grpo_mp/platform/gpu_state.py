"""What the driver says of the GPUs that torch sees: clocks, slowdowns, memory errors, links."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")
# By NVML's bit of the clocks' event reasons. Of the others a GPU in good order has some: idle, a power cap, set clocks.
SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "heat (driver)", 0x40: "heat (hardware)", 0x80: "power brake"}


@dataclass(frozen=True)
class GpuState:
    """One GPU. What its driver does not say is None."""

    index: int  # torch's number
    name: str
    driver: str
    free_bytes: int
    total_bytes: int
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    slowdowns: tuple[str, ...] = ()  # why its clocks are lower than they could be, now
    uncorrected_errors: int | None = None  # of its memory, since the driver was loaded
    remap_failed: bool = False  # a row of its memory is broken and could not be replaced
    links: int = 0  # NVLinks that are up

    def text(self) -> str:
        """Return the GPU in a line."""
        parts = [f"GPU {self.index}: {self.name}, driver {self.driver}"]
        parts.append(f"{self.free_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.1f} GiB free")
        if self.sm_clock_mhz is not None:
            parts.append(f"SM clock {self.sm_clock_mhz} of {self.max_sm_clock_mhz} MHz")
        if self.temperature_c is not None:
            parts.append(f"{self.temperature_c} C")
        return ", ".join([*parts, f"{self.links} NVLinks up"])


def read_gpus(indices: Iterable[int]) -> list[GpuState]:
    """Read the state of GPUs by torch's numbers. Raises RuntimeError where the driver does not answer."""
    with _nvml() as nvml:
        return [_read_gpu(nvml, index) for index in indices]


def peers_without_access(count: int) -> list[tuple[int, int]]:
    """Return the pairs of this machine's first `count` GPUs that cannot read each other's memory."""
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVIDIA's module, ready. Raises RuntimeError where it, or the driver, does not work."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # its own kinds, ImportError
        raise RuntimeError(f"NVIDIA's management library does not work ({error})") from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> GpuState:
    def optional(call: Callable[..., Value], *arguments: Any) -> Value | None:
        try:
            return call(*arguments)
        except nvml.NVMLError:
            return None  # this kind of GPU, or of driver, does not know it

    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError as error:
        raise RuntimeError(f"GPU {index} does not answer the driver ({error})") from error
    reasons = optional(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    remapped = optional(nvml.nvmlDeviceGetRemappedRows, handle)
    links = [optional(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    errors = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return GpuState(
        index=index,
        name=name,
        driver=nvml.nvmlSystemGetDriverVersion(),
        free_bytes=memory.free,
        total_bytes=memory.total,
        sm_clock_mhz=optional(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=optional(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature_c=optional(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        slowdowns=tuple(text for bit, text in SLOWDOWNS.items() if reasons & bit),
        uncorrected_errors=optional(nvml.nvmlDeviceGetTotalEccErrors, handle, *errors),
        remap_failed=bool(remapped and remapped[3]),
        links=sum(bool(link) for link in links),
    )
