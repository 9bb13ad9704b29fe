"""Enter a phase: move what must leave and come, watch the time, record the span and the memory."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.scheduler.memory_tracker import MemoryTracker
from grpo_mp.scheduler.out_of_memory import Items, explain_out_of_memory
from grpo_mp.scheduler.phases import RESIDENT, Phase, Residency, moves

OffloadFunction = Callable[[bool], None]  # True: come to the device; False: leave it


class PhaseManager:
    """The phases of one rank. Without movers nothing leaves the device: on a CPU host and device are one."""

    def __init__(
        self,
        timeline: Timeline,
        watchdog: Watchdog,
        progress: Progress,
        limit_s: float,
        movers: Mapping[str, OffloadFunction] | None = None,
        resident: Residency | None = None,
        items: Items = dict,
    ) -> None:
        """`movers` by field of Residency; `resident` is what is on the device now; `items` says what fills it."""
        self.ledger = MemoryTracker()
        self._timeline, self._watchdog, self._progress, self._limit_s = timeline, watchdog, progress, limit_s
        self._movers, self._items = movers or {}, items
        self._resident = resident or Residency()

    @contextmanager
    def phase(self, phase: Phase, detail: str = "") -> Iterator[None]:
        """The body computes in `phase`."""
        with self._watchdog.phase(phase, self._limit_s), self._progress.phase(phase, detail):
            with explain_out_of_memory(self._watchdog.rank, phase, self._items):
                self._move(RESIDENT[phase])
                self.ledger.begin()
                with self._timeline.span(phase):
                    yield
            self.ledger.end(phase)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The body only waits for other ranks."""
        with self._watchdog.phase("WAIT", self._limit_s), self._timeline.span("WAIT"):
            yield

    def _move(self, wanted: Residency) -> None:
        if not self._movers:
            return
        with self._timeline.span("MOVE"):
            for move in moves(self._resident, wanted):
                self._movers[move.what](move.wake)
        self._resident = wanted
