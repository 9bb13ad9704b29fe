"""CUDA's streams on a CPU, at their worst: what is queued runs in any order that streams and events allow.

Stands for `torch.cuda` in policy/adam_state.py. Queued are the copies made inside `stream`, and on the current stream
the kernels that `queued` wraps.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Event:
    """Done when the stream that recorded it has come to it."""

    def __init__(self) -> None:
        self.done = False

    def record(self) -> None:
        self.done = True


class LateStreams:
    """All streams of a device. Each draw of `seed` is an order."""

    def __init__(self, seed: int) -> None:
        self._streams: list[LateStream] = []
        self._random = random.Random(seed)
        self._current = self.Stream()

    def Stream(self) -> "LateStream":  # noqa: N802 - as torch.cuda names it
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def current_stream(self) -> "LateStream":
        return self._current

    def stream(self, stream: "LateStream") -> TorchFunctionMode:
        return _QueuedCopies(stream)

    def queued(self, kernel: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: self._current.queue.append(lambda: kernel(*arguments))

    def finish(self, stream: "LateStream") -> None:
        """Run any streams' first items until this one has no more."""
        while stream.queue:
            ready = [other for other in self._streams if other.queue and other.is_ready]
            assert ready, "streams wait for each other"
            self._random.choice(ready).run_first()


class LateStream:
    """A queue of calls, and of events that it waits for."""

    def __init__(self, device: LateStreams) -> None:
        self.queue: deque[Callable[[], Any] | Event] = deque()
        self._device = device

    @property
    def is_ready(self) -> bool:
        return not isinstance(self.queue[0], Event) or self.queue[0].done

    def run_first(self) -> None:
        first = self.queue.popleft()
        if not isinstance(first, Event):
            first()

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def record_event(self) -> Event:
        event = Event()
        self.queue.append(event.record)
        return event

    def synchronize(self) -> None:
        self._device.finish(self)


class _QueuedCopies(TorchFunctionMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._queue = stream.queue

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.copy_:
            return function(*args, **(kwargs or {}))
        self._queue.append(lambda: function(*args, **(kwargs or {})))
        return args[0]
