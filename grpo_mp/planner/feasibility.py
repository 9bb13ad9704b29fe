"""Does it fit, and if not, why not."""

from dataclasses import dataclass

from grpo_mp.planner.clusters import GIB
from grpo_mp.planner.memory import SubPhase, total
from grpo_mp.planner.plan import Plan
from grpo_mp.rollout.engine_parallelism import attention_replicas


@dataclass(frozen=True)
class Need:
    """The most that any rank's device, or any node's host, holds: where, when, and its largest kind."""

    place: str
    stretch: SubPhase
    needed: float
    capacity: float
    kind: str
    kind_bytes: float

    @property
    def spare(self) -> float:
        return self.capacity - self.needed

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def sentence(self) -> str:
        """As a user reads it."""
        word = f"{self.spare / GIB:.1f} GiB to spare" if self.fits else f"{-self.spare / GIB:.1f} GiB too much"
        return (
            f"{self.place}: {self.needed / GIB:.1f} of {self.capacity / GIB:.1f} GiB in {self.stretch}, {word}; "
            f"the largest item is {self.kind} ({self.kind_bytes / GIB:.1f} GiB)"
        )


@dataclass(frozen=True)
class Feasibility:
    """`device` and `host`: the fullest. `complaint`: what does not fit beside memory, or nothing."""

    device: Need
    host: Need
    complaint: str

    @property
    def fits(self) -> bool:
        return self.device.fits and self.host.fits and not self.complaint

    @property
    def sentence(self) -> str:
        """The verdict and its reasons."""
        if self.fits:
            return f"fits. {self.device.sentence}. {self.host.sentence}."
        needs = [need.sentence for need in (self.device, self.host) if not need.fits]
        return f"does not fit. {'. '.join([*needs, *filter(None, [self.complaint])])}."


def check_fits(plan: Plan) -> Feasibility:
    """The verdict on a plan."""
    return Feasibility(_device(plan), _host(plan), _cache(plan))


def _device(plan: Plan) -> Need:
    per_stage = plan.job.world_size // len(plan.memory.device)
    stage, stretch = max(
        ((stage, stretch) for stage in range(len(plan.memory.device)) for stretch in SubPhase),
        key=lambda place: total(plan.memory.device[place[0]][place[1]]),
    )
    items = plan.memory.device[stage][stretch]
    kind = max(items, key=lambda name: items[name])
    place = f"rank {stage * per_stage} (pipeline stage {stage})"
    return Need(
        place,
        stretch,
        total(items),
        plan.job.cluster.gpu_bytes,
        kind,
        items[kind],
    )


def _host(plan: Plan) -> Need:
    stretch = max(SubPhase, key=lambda one: total(plan.memory.host[one]))
    items = plan.memory.host[stretch]
    kind = max(items, key=lambda name: items[name])
    return Need("a node's host", stretch, total(items), plan.job.cluster.host_bytes, kind, items[kind])


def _cache(plan: Plan) -> str:
    """A cache must hold at least one of the longest sequences in each replica of an engine."""
    load = plan.memory.engine
    tokens = load.tokens // attention_replicas(plan.job.settings.engine.args)
    if tokens >= plan.job.longest_request:
        return ""
    return (
        f"the engine's cache holds {tokens:,} tokens beside {load.weights / GIB:.1f} GiB of weights, the "
        f"longest sequence has {plan.job.longest_request:,}: raise engine.gpus or engine.args.mem_fraction_static"
    )
