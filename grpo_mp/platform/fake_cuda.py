"""CPU replacement for the parts of torch.cuda that Megatron uses. Only rewritten megatron.* modules see it."""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import (  # noqa: F401
    BFloat16Tensor,
    BoolTensor,
    ByteTensor,
    CharTensor,
    DoubleTensor,
    FloatTensor,
    HalfTensor,
    IntTensor,
    LongTensor,
    manual_seed,
)
from torch.cuda import CUDAGraph, MemPool, OutOfMemoryError, amp, graph, memory  # noqa: F401

CPU = torch.device("cpu")


class Stream:
    """A stream of a CPU: calls are synchronous, so nothing waits."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *args: Any) -> None: ...


ExternalStream = Stream


class Event:
    """An event that has always completed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class _Generators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


default_generators = _Generators()


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _zero(*args: Any) -> int:
    return 0


def _no_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


set_device = synchronize = empty_cache = reset_peak_memory_stats = init = set_stream = _lazy_init = _nothing
memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = _zero
stream = device = _no_context
nvtx = SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context)


def current_device() -> torch.device:
    """Return the CPU; Megatron passes the result as a `device=` argument."""
    return CPU


def device_count() -> int:
    """Return 1."""
    return 1


def is_available() -> bool:
    """Return False: there is no CUDA."""
    return False


def is_initialized() -> bool:
    """Return True: nothing needs initialising."""
    return True


def get_device_capability(*args: Any) -> tuple[int, int]:
    """Return a capability below every kernel's minimum."""
    return (0, 0)


def get_device_properties(*args: Any) -> SimpleNamespace:
    """Return the properties of a device without compute capability."""
    return SimpleNamespace(major=0, minor=0, total_memory=0, name="cpu")


def current_stream(*args: Any) -> Stream:
    """Return the only stream."""
    return Stream()


default_stream = current_stream


def memory_stats(*args: Any) -> dict[str, int]:
    """Return no statistics."""
    return {}


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the state of the CPU's generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Set the state of the CPU's generator."""
    torch.set_rng_state(state)


random = SimpleNamespace(get_rng_state=get_rng_state)


def _lazy_call(call: Any) -> None:
    call()


def to_cpu(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `value.cuda()` and `value.pin_memory()`: return the tensor on the CPU; meta tensors stay meta."""
    return value.cpu() if isinstance(value, torch.Tensor) and not value.is_meta else value
