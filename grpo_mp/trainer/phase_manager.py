"""Enter a phase: offload and onload what it needs, watch the time, record the span and the memory."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from grpo_mp import platform
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.trainer.memory import MemoryItems, MemoryTracker, explain_out_of_memory
from grpo_mp.utils.phases import MOVE, WAIT, Phase, Residency

OffloadFunction = Callable[[bool], None]  # True: onload; False: offload

LOGGER = logging.getLogger(__name__)


class PhaseManager:
    """The phases of one rank. Without offload functions nothing moves: on a CPU host and device are one."""

    def __init__(
        self,
        timeline: Timeline,
        watchdog: Watchdog,
        progress: Progress,
        limit_s: float,
        offload_functions: Mapping[str, OffloadFunction] | None = None,
        resident: Residency | None = None,
        items: MemoryItems = dict,
    ) -> None:
        """Take what the phases need; a phase may last `limit_s` seconds.

        `offload_functions`: by field of Residency; `resident`: what is on the device now; `items`: what fills it.
        """
        self.memory_tracker = MemoryTracker()
        self._timeline, self._watchdog, self._progress, self._limit_s = timeline, watchdog, progress, limit_s
        self._offload_functions, self._items = offload_functions or {}, items
        self._resident = resident or Residency()

    @contextmanager
    def phase(self, phase: Phase, detail: str = "") -> Iterator[None]:
        """Run the body in `phase`."""
        LOGGER.debug("%s begins%s", phase, f": {detail}" if detail else "")
        with self._watchdog.phase(phase, self._limit_s), self._progress.phase(phase, detail):
            with explain_out_of_memory(self._watchdog.rank, phase, self._items):
                self._move_to(phase.resident)
                platform.reset_peak_device_bytes()
                with self._timeline.span(phase):
                    yield
            self.memory_tracker.end(phase)
        LOGGER.debug("%s ends", phase)

    @contextmanager
    def activity(self, name: str, phases: int) -> Iterator[None]:
        """Run a body of at most `phases` phases, which `watch` and `doctor stuck` show inside `name`."""
        with self._watchdog.phase(name, self._limit_s * phases), self._timeline.span(name):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Run a body that only waits for other ranks."""
        with self._watchdog.phase(WAIT, self._limit_s), self._timeline.span(WAIT):
            yield

    def end(self) -> None:
        """Leave the last phase of the job: communicators are not ended while they are suspended."""
        if not self._resident.communicators:
            self._move_to(Residency(communicators=True))

    def _move_to(self, target: Residency) -> None:
        if not self._offload_functions:
            return
        with self._timeline.span(MOVE):
            for item, onload in plan_moves(self._resident, target):
                self._offload_functions[item](onload)
        self._resident = target


def plan_moves(current: Residency, target: Residency) -> list[tuple[str, bool]]:
    """List what changes from one residency to another, as (field, onload): offloads before onloads."""
    before = vars(current)
    moves = [(name, onload) for name, onload in vars(target).items() if onload != before[name]]
    return sorted(moves, key=lambda move: move[1])
