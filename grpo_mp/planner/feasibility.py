"""Whether a plan fits its machines, and if not, why not."""

from dataclasses import dataclass

from grpo_mp.planner.clusters import GIB
from grpo_mp.planner.memory import BytesByKind, SubPhase, total
from grpo_mp.planner.plan import Plan


@dataclass(frozen=True)
class MemoryPeak:
    """The most that any rank's device, or any node's host, holds: where, when, and its largest kind."""

    place: str
    sub_phase: SubPhase
    needed: float
    capacity: float
    kind: str
    kind_bytes: float

    @classmethod
    def of(cls, place: str, sub_phase: SubPhase, sizes: BytesByKind, capacity: float) -> "MemoryPeak":
        """Make the peak from the bytes of each kind: their sum and the largest."""
        kind = max(sizes, key=lambda name: sizes[name])
        return cls(place, sub_phase, total(sizes), capacity, kind, sizes[kind])

    @property
    def headroom(self) -> float:
        return self.capacity - self.needed

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    @property
    def sentence(self) -> str:
        """Return one sentence: place, bytes needed and available, largest item."""
        spare = f"{self.headroom / GIB:.1f} GiB to spare" if self.fits else f"{-self.headroom / GIB:.1f} GiB too much"
        return (
            f"{self.place}: {self.needed / GIB:.1f} of {self.capacity / GIB:.1f} GiB in {self.sub_phase}, {spare}; "
            f"the largest item is {self.kind} ({self.kind_bytes / GIB:.1f} GiB)"
        )


@dataclass(frozen=True)
class Feasibility:
    """Memory peaks, and why the engine's KV cache is too small, if it is."""

    device: MemoryPeak
    host: MemoryPeak
    kv_cache_problem: str

    @property
    def fits(self) -> bool:
        return self.device.fits and self.host.fits and not self.kv_cache_problem

    @property
    def sentence(self) -> str:
        """Return the verdict, and its reasons, in sentences."""
        if self.fits:
            return f"fits. {self.device.sentence}. {self.host.sentence}."
        problems = [peak.sentence for peak in (self.device, self.host) if not peak.fits]
        return f"does not fit. {'. '.join([*problems, *filter(None, [self.kv_cache_problem])])}."


def check_fits(plan: Plan) -> Feasibility:
    """Compare the memory of a plan with that of its machines."""
    job, memory = plan.job, plan.memory
    stage, sub_phase = max(
        ((stage, sub_phase) for stage in range(len(memory.device)) for sub_phase in SubPhase),
        key=lambda item: total(memory.device[item[0]][item[1]]),
    )
    place = f"rank {stage * (job.world_size // len(memory.device))} (pipeline stage {stage})"
    device = MemoryPeak.of(place, sub_phase, memory.device[stage][sub_phase], job.cluster.gpu_bytes)
    sub_phase = max(SubPhase, key=lambda sub_phase: total(memory.host[sub_phase]))
    host = MemoryPeak.of("a node's host", sub_phase, memory.host[sub_phase], job.cluster.host_bytes)
    # The KV cache of each replica of an engine must hold at least one of the longest sequences.
    tokens, kv_cache_problem = memory.engine.kv_cache_tokens // job.engine_parallelism.replicas, ""
    if tokens < job.max_request_len:
        kv_cache_problem = (
            f"the engine's cache holds {tokens:,} tokens beside {memory.engine.weights / GIB:.1f} GiB of weights, the "
            f"longest sequence has {job.max_request_len:,}: raise engine.gpus or engine.args.mem_fraction_static"
        )
    return Feasibility(device, host, kv_cache_problem)
