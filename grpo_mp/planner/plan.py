"""Plan of a job: memory, resource use and time of every sub-phase of a step, and whether memory suffices."""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_mp.planner.engine_use import check_use, generation_use, save_moves_use, sleep_use, sync_use
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.memory import (
    BEFORE_TRAINING,
    BESIDE_A_SAVE,
    BytesByKind,
    MemoryPlan,
    SubPhase,
    communicator_bytes,
    plan_memory,
    total_bytes,
)
from grpo_mp.planner.resource_use import ResourceUse, estimate_time, logprob_use, optimizer_use, train_use
from grpo_mp.utils.phases import GIB

ON_BOTH = (SubPhase.SYNC, SubPhase.CHECK)  # engines and trainer both take part, so nothing overlaps


@dataclass(frozen=True)
class Plan:
    """Memory, resource use and time of a job. `uses` and `times` (see `estimate_time`) are per GPU, by sub-phase."""

    job: PlannedJob
    memory: MemoryPlan
    uses: Mapping[SubPhase, ResourceUse]
    times: Mapping[SubPhase, Mapping[str, float]]

    def seconds(self, sub_phase: SubPhase) -> float:
        if sub_phase not in self.times:
            return 0.0
        save_every = self.job.settings.run.save_every
        times = (1 / save_every if save_every else 0.0) if sub_phase is SubPhase.SAVE else 1.0
        return sum(self.times[sub_phase].values()) * times

    @property
    def sides_s(self) -> tuple[float, float, float]:
        """Return the expected seconds per step of generation, training, and weight sync."""
        trains = [sub_phase for sub_phase in self.times if sub_phase not in (SubPhase.GENERATE, *ON_BOTH)]
        sync_s = sum(map(self.seconds, ON_BOTH))
        return self.seconds(SubPhase.GENERATE), sum(map(self.seconds, trains)), sync_s

    @property
    def step_s(self) -> float:
        """Return the expected seconds of a step; engines with their own GPUs generate while the policy trains."""
        generation_s, training_s, sync_s = self.sides_s
        shares = self.job.settings.shares_devices
        return (generation_s + training_s if shares else max(generation_s, training_s)) + sync_s


def make_plan(job: PlannedJob) -> Plan:
    """Plan a job."""
    memory = plan_memory(job)
    uses = {
        SubPhase.TRAIN: train_use(job),
        SubPhase.OPTIMIZER: optimizer_use(job, job.largest_stage),
    }
    if not job.trains_only:
        uses |= _rollout_uses(job, memory)
    uses[SubPhase.SAVE] = _save_use(job, uses)
    of_a_step = [sub_phase for sub_phase in memory.host if sub_phase not in BEFORE_TRAINING]
    uses = {sub_phase: uses.get(sub_phase, ResourceUse()) for sub_phase in of_a_step}
    times = {sub_phase: estimate_time(use, job.cluster) for sub_phase, use in uses.items()}
    return Plan(job, memory, uses=uses, times=times)


def _rollout_uses(job: PlannedJob, memory: MemoryPlan) -> dict[SubPhase, ResourceUse]:
    """Return the resource use of generation, of logprobs, and of moving state between trainer and engines."""
    per_parameter = job.per_parameter
    stage = job.largest_stage
    algorithm = job.settings.algorithm
    passes = algorithm.needs_old_logprobs(job.settings.optimizer_steps_per_step) + bool(algorithm.kl.coef)
    swap = 4 * job.policy_trained_counts[stage].total * per_parameter.weights * job.has_reference
    weights = 2 * job.held_weight_bytes[stage] * job.offloads
    moves = job.offloads and job.optimizer_offload == "step"
    state = job.trained_share(stage) * per_parameter.optimizer * 2 * moves  # offload and onload
    moved = weights + state + 2 * _suspended_bytes(job)
    return {
        SubPhase.GENERATE: generation_use(job, memory.engine),
        SubPhase.LOGPROB: logprob_use(job, passes) + ResourceUse(host_link_bytes=swap),
        SubPhase.OFFLOAD: ResourceUse(host_link_bytes=moved) + sleep_use(job),
        SubPhase.SYNC: sync_use(job),
        SubPhase.CHECK: check_use(job, memory.engine),
    }


def _suspended_bytes(job: PlannedJob) -> float:
    in_use, suspended = communicator_bytes(job)
    return (in_use - suspended) * job.offloads


def save_uses(job: PlannedJob) -> tuple[ResourceUse, ResourceUse]:
    """Return the resource use of one GPU for a checkpoint: of the weights, and of the rest.

    The weights include those of an updated reference. The next step waits for the weights, but not for the rest.
    """
    per_parameter = job.per_parameter
    nodes = max(1.0, job.train_ranks / job.gpus_per_node)
    waits_for = per_parameter.weights + per_parameter.saved_reference
    weights = ResourceUse(disk_bytes=job.trained_parameters * waits_for / nodes)
    share = max(map(job.trained_share, range(len(job.stage_layers))))
    rest = ResourceUse(
        disk_bytes=job.trained_parameters * per_parameter.saved_state / nodes,
        host_copy_bytes=share * (per_parameter.weights + per_parameter.saved_state),
    )
    return weights, rest


def _save_use(job: PlannedJob, uses: Mapping[SubPhase, ResourceUse]) -> ResourceUse:
    """Return the resource use that a save adds to a step, without the part hidden behind the next step's phases."""
    weights, rest = save_uses(job)
    if job.trains_only:
        return weights + rest  # the next update waits for the whole save
    if job.saves_weights_beside:
        rest = weights + rest
        weights = ResourceUse()
    # Waiting for engines also hides a save, but then generation sets the step time, so it is not counted.
    beside = BESIDE_A_SAVE if job.settings.shares_devices else (SubPhase.LOGPROB,)
    hidden_s = sum(sum(estimate_time(uses[phase], job.cluster).values()) for phase in beside if phase in uses)
    share = 1 - hidden_s / sum(estimate_time(rest, job.cluster).values())
    moves = save_moves_use(job, job.held_weight_bytes[job.largest_stage] + _suspended_bytes(job))
    return weights + rest.scaled(max(0.0, share)) + moves


@dataclass(frozen=True)
class MemoryPeak:
    """Highest memory use of any rank's device or any node's host: its place, sub-phase, and bytes by kind."""

    place: str
    sub_phase: SubPhase
    sizes: BytesByKind
    capacity: float

    @classmethod
    def of(cls, places: Mapping[str, Mapping[SubPhase, BytesByKind]], capacity: float) -> "MemoryPeak":
        peaks = [cls(place, *item, capacity) for place, by_phase in places.items() for item in by_phase.items()]
        return min(peaks, key=lambda peak: peak.headroom)

    @property
    def headroom(self) -> float:
        """Return the spare bytes; negative if the peak exceeds the capacity."""
        return self.capacity - total_bytes(self.sizes)

    @property
    def sentence(self) -> str:
        needed, capacity, spare = (size / GIB for size in (total_bytes(self.sizes), self.capacity, self.headroom))
        kind = max(self.sizes, key=lambda name: self.sizes[name])
        return (
            f"{self.place}: {needed:.1f} of {capacity:.1f} GiB in {self.sub_phase}, {abs(spare):.1f} GiB "
            f"{'to spare' if spare >= 0 else 'too much'}; the largest item is {kind} ({self.sizes[kind] / GIB:.1f} GiB)"
        )


@dataclass(frozen=True)
class Feasibility:
    """Memory peaks, and an error message if the KV cache is too small ("" otherwise)."""

    device: MemoryPeak
    host: MemoryPeak
    kv_cache_problem: str

    @property
    def fits(self) -> bool:
        return min(self.device.headroom, self.host.headroom) >= 0 and not self.kv_cache_problem

    @property
    def sentence(self) -> str:
        if self.fits:
            return f"fits. {self.device.sentence}. {self.host.sentence}."
        problems = [peak.sentence for peak in (self.device, self.host) if peak.headroom < 0]
        return f"does not fit. {'. '.join([*problems, *filter(None, [self.kv_cache_problem])])}."


def check_fits(plan: Plan) -> Feasibility:
    """Compare the memory peaks of a plan with the memory of its machines."""
    job = plan.job
    memory = plan.memory
    per_stage = job.train_ranks // len(memory.device)
    places = {f"rank {stage * per_stage} (pipeline stage {stage})": sizes for stage, sizes in enumerate(memory.device)}
    places |= {f"rank {job.train_ranks} (an engine)": memory.engine_device} if memory.engine_device else {}
    host = MemoryPeak.of({"a node's host": memory.host}, job.cluster.host_memory_gib * GIB)
    return Feasibility(MemoryPeak.of(places, job.cluster.gpu_bytes), host, _kv_cache_problem(plan))


def _kv_cache_problem(plan: Plan) -> str:
    """Describe why a replica's KV cache cannot hold one sequence of the maximum length; return "" if it can."""
    job = plan.job
    engine = plan.memory.engine
    tokens = engine.kv_cache_tokens // job.engine_parallelism.replicas
    if job.trains_only or tokens >= job.settings.max_request_tokens:
        return ""
    return (
        f"the engine's cache holds {tokens:,} tokens beside {engine.weights / GIB:.1f} GiB of weights, the longest "
        f"sequence has {job.settings.max_request_tokens:,}: raise engine.gpus_per_engine or "
        "engine.args.mem_fraction_static"
    )
