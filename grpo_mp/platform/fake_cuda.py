"""CPU replacement for the parts of torch.cuda that Megatron uses. Modules rewritten by import_hook use it."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import BFloat16Tensor, FloatTensor, HalfTensor, manual_seed  # noqa: F401
from torch.cuda import CUDAGraph, MemPool, OutOfMemoryError, amp, graph, memory  # noqa: F401

CPU = torch.device("cpu")


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class Event:
    """CUDA event that is always completed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = _returns(None)
    query = _returns(True)
    elapsed_time = _returns(0.0)


class Stream:
    """CUDA stream on a CPU, where all calls are synchronous."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = _returns(None)
    query = _returns(True)

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *args: Any) -> None: ...


ExternalStream = Stream


class _Generators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


default_generators = _Generators()
set_device = set_stream = synchronize = empty_cache = _lazy_init = _returns(None)
memory_allocated = memory_reserved = _returns(0)
memory_stats = _returns({})
current_device = _returns(CPU)  # a device and not an index, because Megatron passes it as a `device=` argument
current_stream = default_stream = _returns(Stream())
stream = device = _returns(contextlib.nullcontext())
nvtx = SimpleNamespace(range_push=_returns(None), range_pop=_returns(None), range=device)
device_count = _returns(1)
is_available = _returns(False)
is_initialized = _returns(True)
get_device_capability = _returns((0, 0))  # lower than any kernel requires
get_device_properties = _returns(SimpleNamespace(major=0, minor=0, total_memory=0, name="cpu"))


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the state of torch's CPU random generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Set the state of torch's CPU random generator."""
    torch.set_rng_state(state)


random = SimpleNamespace(get_rng_state=get_rng_state)


def _lazy_call(call: Callable[[], None]) -> None:
    call()


def to_cpu(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `value.cuda()` and `value.pin_memory()`: return tensors on the CPU; keep modules and meta tensors."""
    return value.cpu() if isinstance(value, torch.Tensor) and not value.is_meta else value
