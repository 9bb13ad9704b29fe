"""One plan: memory, work and time of every stretch of a step, put together."""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_mp.algorithms.settings import needs_old_logprobs
from grpo_mp.planner.bytes_per_parameter import BytesPerParameter, bytes_per_parameter
from grpo_mp.planner.generation import Generation, generate_work, plan_generation
from grpo_mp.planner.job import Job
from grpo_mp.planner.memory import Memory, SubPhase, plan_memory
from grpo_mp.planner.overheads import OVERHEADS
from grpo_mp.planner.resource_use import Time, Work, time_of
from grpo_mp.planner.training import logprob_work, optimizer_work, train_work

ONCE = (SubPhase.START, SubPhase.LOAD)  # of a run; saving is counted by its share of a step


@dataclass(frozen=True)
class Plan:
    """What a job needs and how long a step takes it. `work` and `times` are of one GPU."""

    job: Job
    memory: Memory
    work: Mapping[SubPhase, Work]
    times: Mapping[SubPhase, Time]
    generation: Generation

    @property
    def step_s(self) -> float:
        return sum(self.times[stretch].expected_s * self.share(stretch) for stretch in SubPhase)

    @property
    def roofline_s(self) -> float:
        return sum(self.times[stretch].roofline_s * self.share(stretch) for stretch in SubPhase)

    @property
    def costliest(self) -> tuple[SubPhase, str, float]:
        """The stretch and the item in it that takes most of a step, and its seconds."""
        found = [
            (stretch, name, seconds * self.share(stretch))
            for stretch in SubPhase
            for name, seconds in self.times[stretch].parts.items()
        ]
        return max(found, key=lambda item: item[2])

    def share(self, stretch: SubPhase) -> float:
        """How often a stretch happens in a step."""
        every = self.job.settings.run.save_every
        return 0.0 if stretch in ONCE else (1 / every if every else 0.0) if stretch is SubPhase.SAVE else 1.0


def make_plan(job: Job, kept: BytesPerParameter | None = None) -> Plan:
    """`kept` stands in for how this trainer keeps its parameters."""
    kept = kept or bytes_per_parameter(job.settings)
    memory = plan_memory(job, kept)
    work = _work(job, kept, memory)
    times = {stretch: time_of(one, job.cluster) for stretch, one in work.items()}
    return Plan(job, memory, work, times, plan_generation(job, memory.engine))


def _work(job: Job, kept: BytesPerParameter, memory: Memory) -> dict[SubPhase, Work]:
    stage = max(range(len(job.counts)), key=lambda number: job.counts[number].total)
    count, engine = job.counts[stage], memory.engine
    algorithm = job.settings.algorithm
    passes = needs_old_logprobs(algorithm, job.settings.optimizer_steps_per_step) + algorithm.kl.measured_share
    swap = 4 * count.total * kept.weights * job.has_reference
    sharded = count.dense / job.dense_shards + count.expert / job.expert_shards
    state = sharded * kept.optimizer * 2 * job.moves  # there and back
    nodes = job.nodes
    whole = _whole_parameters(job)
    return {
        SubPhase.START: Work(),  # engines read no weights
        SubPhase.LOAD: Work(disk_bytes=count.total * 2 * job.gpus_per_node, host_link_bytes=count.total * 2),
        SubPhase.GENERATE: generate_work(job, engine),
        SubPhase.SCORE: Work(),
        SubPhase.LOGPROB: logprob_work(job, passes) + Work(host_link_bytes=swap),
        SubPhase.TRAIN: train_work(job),
        SubPhase.OPTIMIZER: optimizer_work(job, kept, stage),
        SubPhase.OFFLOAD: Work(host_link_bytes=2 * count.total * kept.weights * job.moves + state),
        SubPhase.SYNC: _sync(job, whole * kept.weights),
        # Written, then read for its checksums.
        SubPhase.SAVE: Work(disk_bytes=2 * whole * (12 + kept.weights) / nodes, host_copy_bytes=sharded * 12),
    }


def _whole_parameters(job: Job) -> float:
    layout = job.settings.layout
    dense = sum(count.dense for count in job.counts) * layout.tensor  # counts what tensor ranks hold alike as often
    return dense + sum(count.expert for count in job.counts) * layout.expert * layout.expert_tensor


def _sync(job: Job, nbytes: float) -> Work:
    """Every GPU of every engine receives the whole model, bucket by bucket, from the ranks that hold it."""
    mine = 1 / job.world_size
    near = (min(job.gpus_per_node, job.world_size) - 1) / job.world_size
    buckets = -(-nbytes // job.settings.sync.bucket_bytes)
    return Work(
        device_bytes=4 * nbytes,
        nvlink_bytes=nbytes * near,
        network_bytes=nbytes * max(0.0, 1 - near - mine),
        latency_s=buckets * OVERHEADS.bucket_s,
    )
