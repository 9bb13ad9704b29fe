"""Enter a phase: offload and onload its items, apply its time limit, record its time span and memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from grpo_mp import platform
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import GIB, MOVE, WAIT, Phase, Residency

OffloadFunction = Callable[[bool], None]  # True: onload; False: offload
LARGEST_ITEMS = 4  # named in an out-of-memory message
ACTIVATION_ADVICE = "lower training.max_tokens_per_microbatch or training.logprob_chunk_tokens"
STATE_ADVICE = (
    "divide the policy further (layout), let the optimizer keep less (training.megatron_args), or set "
    "optimizer.offload=host"
)
ADVICE: Mapping[str, str] = {
    Phase.LOGPROB: ACTIVATION_ADVICE,
    Phase.TRAIN: f"{ACTIVATION_ADVICE}, set training.recompute=full, or {STATE_ADVICE}",
    Phase.SYNC: "lower sync.bucket_bytes or engine.args.mem_fraction_static",
    Phase.SAVE: STATE_ADVICE,
}
MemoryItems = Callable[[], Mapping[str, float]]  # bytes on the device by name of the item


class PhaseManager:
    """Runs the phases of one rank. Without `offload_functions` nothing moves between host and device."""

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
        """Create the manager. `limit_s`: time limit of a phase in seconds.

        `offload_functions`: by field of Residency; `resident`: items that are on the device now; `items`: returns their
        bytes for the out-of-memory message.
        """
        self.memory_tracker = MemoryTracker()
        self._timeline = timeline
        self._watchdog = watchdog
        self._progress = progress
        self._limit_s = limit_s
        self._offload_functions = offload_functions or {}
        self._items = items
        self._resident = resident or Residency()

    @contextmanager
    def phase(self, phase: Phase, detail: str = "") -> Iterator[None]:
        """Run the body as `phase`, with the items of the phase on the device."""
        with self._watchdog.phase(phase, self._limit_s), self._progress.phase(phase, detail):
            with explain_out_of_memory(self._watchdog.rank, phase, self._items):
                self._move_to(phase.resident)
                platform.reset_peak_device_bytes()
                with self._timeline.span(phase):
                    yield
            self.memory_tracker.end(phase)

    @contextmanager
    def activity(self, name: str, phases: int) -> Iterator[None]:
        """Run a body of up to `phases` phases as one time span, with the time limit of that many phases."""
        with self._watchdog.phase(name, self._limit_s * phases), self._timeline.span(name):
            yield

    def waiting(self) -> AbstractContextManager[None]:
        """Run a body that waits for other ranks outside a phase."""
        return self.activity(WAIT, 1)

    def end(self) -> None:
        """Onload the NCCL communicators at the end of the job."""
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
    """Return the moves from one residency to another as (field, onload), offloads first."""
    before = vars(current)
    moves = [(name, onload) for name, onload in vars(target).items() if onload != before[name]]
    return sorted(moves, key=lambda move: move[1])


class MemoryUsage(NamedTuple):
    """Memory of host and device at the end of a phase, and the device's peak in the phase; 0 for a CPU device."""

    host_bytes: int
    device_bytes: int
    peak_device_bytes: int


class MemoryTracker:
    """Tracks the largest memory usage of each phase since the last `take`."""

    def __init__(self) -> None:
        self._phases: dict[str, MemoryUsage] = {}

    def end(self, phase: str) -> None:
        usage = MemoryUsage(platform.host_bytes(), torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        self._phases[phase] = max_usage([usage, self._phases.get(phase, usage)])

    def take(self) -> dict[str, MemoryUsage]:
        """Return the usage by phase and reset it."""
        usages = self._phases
        self._phases = {}
        return usages


def max_usage(usages: Iterable[MemoryUsage]) -> MemoryUsage:
    """Return the maximum of each field over one or more usages."""
    return MemoryUsage(*map(max, zip(*usages, strict=True)))


@contextmanager
def explain_out_of_memory(rank: int, phase: str, items: MemoryItems) -> Iterator[None]:
    """Convert an out-of-memory error of the body to a UserError that names the largest items and a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = sorted((item for item in items().items() if item[1]), key=lambda item: -item[1])[:LARGEST_ITEMS]
        usage = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in held) or "nothing of this rank"
        advice = ADVICE.get(phase, STATE_ADVICE)
        raise UserError(f"rank {rank} in {phase}: out of device memory; it holds {usage}: {advice}") from error
