"""Memory of each phase on this rank; where it runs out, what holds most of it and which setting helps."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from grpo_mp import platform
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import GIB, Phase

LARGEST_ITEMS = 4  # that the message names
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
MemoryItems = Callable[[], Mapping[str, float]]  # bytes on the device, by what they are


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
        self._phases[phase] = max_usage([usage, self._phases.get(phase, usage)])

    def take(self) -> dict[str, MemoryUsage]:
        """Return the usage by phase since the last call, and forget it."""
        usages, self._phases = self._phases, {}
        return usages


def max_usage(usages: Iterable[MemoryUsage]) -> MemoryUsage:
    """Take the maximum of each field; needs at least one usage."""
    first, *rest = usages
    for other in rest:
        first = replace(first, **{name: max(value, getattr(other, name)) for name, value in vars(first).items()})
    return first


@contextmanager
def explain_out_of_memory(rank: int, phase: str, items: MemoryItems) -> Iterator[None]:
    """Raise the allocator's error as one sentence (UserError)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = sorted((item for item in items().items() if item[1]), key=lambda item: -item[1])[:LARGEST_ITEMS]
        usage = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in held) or "nothing of this rank"
        advice = ADVICE.get(phase, STATE_ADVICE)
        raise UserError(f"rank {rank} in {phase}: out of device memory; it holds {usage}: {advice}") from error
