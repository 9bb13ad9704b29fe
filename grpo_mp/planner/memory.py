"""Bytes on one rank's device and on one node's host in every phase of this trainer, by kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.phases import Phase, Residency
from grpo_mp.planner.activations import activation_bytes, forward_bytes, logits_bytes
from grpo_mp.planner.bytes_per_parameter import BytesPerParameter, bytes_per_parameter
from grpo_mp.planner.engine import EngineLoad, engine_load
from grpo_mp.planner.job import Job
from grpo_mp.planner.overheads import OVERHEADS
from grpo_mp.planner.parameter_count import Count

Items = Mapping[str, float]


class SubPhase(StrEnum):
    """A stretch of a run in which what is held stays the same: the phases, some of them in parts."""

    START = "start"
    LOAD = "load"
    GENERATE = "generate"
    SCORE = "score"
    LOGPROB = "logprob"
    TRAIN = "train"
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"
    SYNC = "sync"
    SAVE = "save"


PHASES = {
    SubPhase.GENERATE: Phase.GENERATE,
    SubPhase.SCORE: Phase.SCORE,
    SubPhase.LOGPROB: Phase.LOGPROB,
    SubPhase.TRAIN: Phase.TRAIN,
    SubPhase.OPTIMIZER: Phase.TRAIN,
    SubPhase.OFFLOAD: Phase.TRAIN,
    SubPhase.SYNC: Phase.SYNC,
    SubPhase.SAVE: Phase.SAVE,
}
EVERYTHING = Residency(True, True, True, True, True)
CHECKPOINT = 12  # bytes of a parameter's main weight and two moments, in float32 whatever the optimizer keeps


@dataclass(frozen=True)
class Memory:
    """Device bytes of a rank of each stage, [stage][stretch][kind], and host bytes of the fullest node."""

    device: tuple[Mapping[SubPhase, Items], ...]
    host: Mapping[SubPhase, Items]
    engine: EngineLoad


def plan_memory(job: Job, kept: BytesPerParameter | None = None) -> Memory:
    """`kept` stands in for how this trainer keeps its parameters."""
    kept, engine = kept or bytes_per_parameter(job.settings), engine_load(job)
    device = tuple(_device(job, stage, kept, engine) for stage in range(len(job.stages)))
    return Memory(device, _host(job, kept), engine)


def total(items: Items) -> float:
    """The sum over kinds."""
    return sum(items.values())


def _device(job: Job, stage: int, kept: BytesPerParameter, engine: EngineLoad) -> dict[SubPhase, Items]:
    held = _held(job, job.counts[stage], kept)
    always = {"contexts": 2 * OVERHEADS.context, "communication": OVERHEADS.trainer_groups + engine.groups}
    found: dict[SubPhase, Items] = {}
    for stretch in SubPhase:
        trainer = _resident(job, stretch, held) | _working(job, stage, stretch, kept)
        fragments = {"fragments": OVERHEADS.fragments * sum(trainer.values())}
        items = always | trainer | fragments | _resident_engine(job, stretch, engine)
        found[stretch] = {kind: size for kind, size in items.items() if size}
    return found


def _held(job: Job, count: Count, kept: BytesPerParameter) -> dict[str, float]:
    return {
        "weights": count.total * kept.weights,
        "gradients": count.total * kept.gradients,
        "optimizer": _sharded(job, count) * kept.optimizer,
    }


def _sharded(job: Job, count: Count) -> float:
    """Parameters whose optimizer state this rank keeps."""
    return count.dense / job.dense_shards + count.expert / job.expert_shards


def _residency(job: Job, stretch: SubPhase) -> Residency:
    """What the phase keeps on the device; before the first phase the engines are up, then asleep while we load."""
    if not job.moves:
        return EVERYTHING
    if stretch is SubPhase.START:
        return Residency(engine_weights=True, engine_cache=True)
    if stretch is SubPhase.LOAD:
        return Residency(policy_weights=True, gradients=True, optimizer=True)
    return PHASES[stretch].resident


def _resident(job: Job, stretch: SubPhase, held: Items) -> dict[str, float]:
    found = _residency(job, stretch)
    policy = {"weights": found.policy_weights, "gradients": found.gradients, "optimizer": found.optimizer}
    return {kind: size for kind, size in held.items() if policy[kind]}


def _resident_engine(job: Job, stretch: SubPhase, engine: EngineLoad) -> dict[str, float]:
    found = _residency(job, stretch)
    weights = {"engine weights": engine.weights} if found.engine_weights else {}
    cache = {"KV cache": engine.cache, "CUDA graphs": engine.graphs} if found.engine_cache else {}
    return weights | cache


def _working(job: Job, stage: int, stretch: SubPhase, kept: BytesPerParameter) -> dict[str, float]:
    """What a stretch allocates for itself."""
    if stretch is SubPhase.LOGPROB:
        exchanged = largest_tensor(job) * kept.weights if job.has_reference else 0.0
        logits = logits_bytes(job, stage, backward=False)
        return {"activations": forward_bytes(job, stage), "logits": logits, "reference": exchanged}
    if stretch is SubPhase.TRAIN:
        return {"activations": activation_bytes(job, stage), "logits": logits_bytes(job, stage, backward=True)}
    if stretch is SubPhase.OPTIMIZER:
        return {"float32 gradients": _sharded(job, job.counts[stage]) * kept.update}
    if stretch is SubPhase.SAVE:
        return {"moments in float32": largest_tensor(job) * kept.saved}
    if stretch is SubPhase.SYNC:  # one flat tensor; of more than one rank also shards that arrive, and whole tensors
        return {"sync bucket": (3.0 if job.world_size > 1 else 1.0) * job.settings.sync.bucket_bytes}
    return {}


def largest_tensor(job: Job) -> float:
    """Elements of the output layer or the largest matrix of a layer, on one rank."""
    shape, tensor = job.shape, job.settings.layout.tensor
    return max(shape.vocabulary, 2 * shape.dense_width, 2 * shape.expert_width) / tensor * shape.hidden


def _host(job: Job, kept: BytesPerParameter) -> dict[SubPhase, Items]:
    """The fullest node by stretch. A node may hold ranks of several stages."""
    nodes = [range(start, start + job.gpus_per_node) for start in range(0, job.world_size, job.gpus_per_node)]
    kinds = {(_kinds_on(job, node)) for node in nodes}
    each = [_node(job, kept, ranks) for ranks in kinds]
    return {stretch: max((node[stretch] for node in each), key=total) for stretch in SubPhase}


def _kinds_on(job: Job, node: range) -> tuple[tuple[int, bool, bool], ...]:
    """(stage, first of its dense replicas, first of its expert replicas) of every rank of a node."""
    layout, world_size = job.settings.layout, job.world_size
    coords = [coordinates(rank, layout, world_size) for rank in node]
    return tuple((at.pipeline, at.data == 0 and at.context == 0, at.expert_data == 0) for at in coords)


def _node(job: Job, kept: BytesPerParameter, ranks: tuple[tuple[int, bool, bool], ...]) -> dict[SubPhase, Items]:
    each = [_rank_host(job, job.counts[stage], kept, dense, expert) for stage, dense, expert in ranks]
    return {
        stretch: {kind: sum(rank[stretch][kind] for rank in each) for kind in each[0][stretch]} for stretch in SubPhase
    }


def _rank_host(
    job: Job, count: Count, kept: BytesPerParameter, dense: bool, expert: bool
) -> dict[SubPhase, dict[str, float]]:
    base = {
        "processes": OVERHEADS.trainer_process + OVERHEADS.engine_process,
        "weights": count.total * kept.host_copies,
        "reference": count.total * kept.weights * job.has_reference,
        "optimizer": _sharded(job, count) * kept.host_optimizer,
    }
    away = base["optimizer"] + _sharded(job, count) * kept.optimizer * job.moves
    writers = Count(count.dense * dense, count.expert * expert)
    host = {}
    for stretch in SubPhase:
        items = dict(base)
        if stretch not in (SubPhase.START, SubPhase.LOAD, SubPhase.SAVE):
            items["optimizer"] = away  # its pinned copy stays while it is on the device, but for a checkpoint
        if stretch is SubPhase.OFFLOAD:
            items["weights"] += count.total * kept.weights * job.moves
        items["checkpoint"] = _checkpoint(job, stretch, count, writers, kept)
        host[stretch] = items
    for stretch in (SubPhase.START, SubPhase.LOAD):
        host[stretch]["weights"] = 0.0
    return host


def _checkpoint(job: Job, stretch: SubPhase, count: Count, writers: Count, kept: BytesPerParameter) -> float:
    """Host bytes of float32 main weights and moments: whole on every rank that resumes, on the first replica to save.

    Without buckets of gradients (overlap_grad_reduce) one gather moves everything at a time; then the three become
    tensors of their own, one after the other, and the weights are copied to be written. What is read is for a moment
    there as the file's bytes and as a tensor.
    """
    if stretch is SubPhase.LOAD:
        return count.total * CHECKPOINT + 2 * 4 * largest_tensor(job)
    if stretch is not SubPhase.SAVE:
        return 0.0
    bucketed = job.settings.optimizer.megatron.get("overlap_grad_reduce", False)
    gather = 0.0 if bucketed else _sharded(job, count) * CHECKPOINT + writers.total * 8
    return writers.total * CHECKPOINT + max(gather, writers.total * max(4, kept.weights))
