"""Bytes on one rank's device and on one node's host in every phase of this trainer, by kind."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo_mp.checkpoint.hf_writer import SHARD_BYTES
from grpo_mp.distributed.communicators import PIPELINE, communicators
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.families import family_of
from grpo_mp.phases import TRAINER, Phase, Residency
from grpo_mp.planner.activations import activation_bytes, forward_bytes, logits_bytes
from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import DTYPE_BYTES, PlannedJob
from grpo_mp.planner.parameter_count import rule_parameters
from grpo_mp.rollout.engine_parallelism import read_argument
from grpo_mp.types import expert_id_bytes
from grpo_mp.weight_sync.plan import ROUNDS_IN_MEMORY


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU; `kv_cache_tokens` is what the KV caches of the engine hold."""

    weights: float
    kv_cache: float
    cuda_graphs: float
    communication: float
    bytes_per_token: float
    kv_cache_tokens: int


def engine_memory(job: PlannedJob) -> EngineMemory:
    """Return weights, and the KV cache that `mem_fraction_static` leaves beside them (0 where it leaves nothing).

    Raises UserError where engine.gpus_per_engine and engine.args do not divide each other, the model or a block of FP8.
    """
    args, weights = job.settings.engine.args, engine_weight_bytes(job)
    fraction = read_argument(args, "mem_fraction_static", OVERHEADS.mem_fraction_static)
    kv_cache, model = max(0.0, fraction * job.cluster.gpu_bytes - weights), job.model
    # Of one GPU; a latent cache is the same on every GPU of a replica.
    kv_heads = max(1, model.num_kv_heads / job.engine_parallelism.attention_tensor)
    elements = model.num_layers * (model.mla_cache_dim or 2 * kv_heads * model.qk_head_dim)
    bytes_per_token = elements * (
        1 if "fp8" in str(args.get("kv_cache_dtype")) else DTYPE_BYTES[job.settings.model.dtype]
    )
    deepep = OVERHEADS.deepep_buffers if args.get("moe_a2a_backend") == "deepep" else 0.0
    return EngineMemory(
        weights=weights,
        kv_cache=kv_cache,
        cuda_graphs=0.0 if args.get("disable_cuda_graph") else OVERHEADS.cuda_graphs,
        communication=OVERHEADS.engine_nccl + deepep,
        bytes_per_token=bytes_per_token,
        kv_cache_tokens=int(kv_cache / bytes_per_token) * job.engine_parallelism.replicas,
    )


def engine_weight_bytes(job: PlannedJob) -> float:
    """Return the bytes of weights on one GPU. In blockwise FP8, embedding, output and routers keep the model's dtype.

    Copies of key and value heads, where there are fewer than ranks, are left out: a few thousandths.
    """
    args = job.settings.engine.args
    parallelism, dtype_bytes = job.engine_parallelism, DTYPE_BYTES[job.settings.model.dtype]
    layer_bytes = 1 + 4 / 128**2 if job.engine_uses_fp8 else dtype_bytes  # with a float32 scale for each block
    size = 0.0
    for rule in family_of(job.hf).rules(job.hf):
        if rule.applies_to_no_layer or rule.alias:
            continue
        # Outside the layers only the embedding follows attention, and with its own option the output layer.
        like_layers = "layers" in rule.name or rule.name.startswith("embedding") or args.get("enable_dp_lm_head")
        tensor = parallelism.divisor(rule.name, routed_expert=False)[0] if like_layers else parallelism.gpus
        count = rule_parameters(rule, tensor, parallelism.expert, parallelism.expert_tensor)
        quantized = rule.layers and "router" not in rule.name
        size += count.total * len(rule.layers or (0,)) * (layer_bytes if quantized else dtype_bytes)
    return size


BytesByKind = Mapping[str, float]


class SubPhase(StrEnum):
    """A phase, or a part of one, in which memory use stays the same."""

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


# What is on the device. Before the first phase the engines are up, then asleep while the policy loads.
RESIDENT = {
    SubPhase.START: Residency(engine_weights=True, engine_cache=True),
    SubPhase.LOAD: replace(TRAINER, gradients=True, optimizer=True),
    SubPhase.OPTIMIZER: Phase.TRAIN.resident,
    SubPhase.OFFLOAD: Phase.TRAIN.resident,
    **{SubPhase[phase.name]: phase.resident for phase in Phase if phase.name in SubPhase.__members__},
}
BESIDE_A_SAVE = (SubPhase.GENERATE, SubPhase.SCORE, SubPhase.LOGPROB)
ALL_RESIDENT = Residency(True, True, True, True, True, True)


# The kinds of a plan that the trainer measures under one name: `device_items` of policy/offload.py.
MEASURED: Mapping[str, tuple[str, ...]] = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations and buffers": (
        "activations",
        "logits",
        "reference",
        "float32 gradients",
        "optimizer pieces",
        "sync rounds",
    ),
    "kept by the allocator": ("fragments",),
    "engine, communicators and contexts": (
        "engine weights",
        "KV cache",
        "CUDA graphs",
        "communication",
        "contexts",
    ),
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by kind: on the device of a rank of each stage, [stage][sub-phase], and on the host of the fullest node."""

    device: tuple[Mapping[SubPhase, BytesByKind], ...]
    host: Mapping[SubPhase, BytesByKind]
    engine: EngineMemory


def plan_memory(job: PlannedJob) -> MemoryPlan:
    """Plan the memory of a job."""
    engine = engine_memory(job)
    device = tuple(_device_memory(job, stage, engine) for stage in range(len(job.stage_layers)))
    return MemoryPlan(device, _host_memory(job, engine), engine)


def total_bytes(sizes: BytesByKind) -> float:
    """Sum over kinds."""
    return sum(sizes.values())


def _device_memory(job: PlannedJob, stage: int, engine: EngineMemory) -> dict[SubPhase, BytesByKind]:
    count, per_parameter = job.parameter_counts[stage], job.per_parameter
    in_use, suspended = communicator_bytes(job)
    memory: dict[SubPhase, BytesByKind] = {}
    for sub_phase in SubPhase:
        resident = RESIDENT[sub_phase] if job.settings.model.offloads else ALL_RESIDENT
        trainer = {
            "weights": resident.policy_weights * count.total * per_parameter.weights,
            "gradients": resident.gradients * count.total * per_parameter.gradients,
            "optimizer": _has_optimizer(job, sub_phase) * job.sharded_parameters(count) * per_parameter.optimizer,
        } | _temporary_memory(job, stage, sub_phase)
        communication = in_use if resident.communicators else suspended
        sizes = {
            "contexts": 2 * OVERHEADS.cuda_context,
            "communication": communication + engine.communication,
        } | trainer
        sizes["fragments"] = OVERHEADS.fragmentation * total_bytes(trainer)
        sizes["engine weights"] = resident.engine_weights * engine.weights
        sizes["KV cache"] = resident.engine_cache * engine.kv_cache
        sizes["CUDA graphs"] = resident.engine_cache * engine.cuda_graphs
        memory[sub_phase] = {kind: size for kind, size in sizes.items() if size}
    return memory


def communicator_bytes(job: PlannedJob) -> tuple[float, float]:
    """Return the bytes of the trainer's communicators on one device: in use, and while engines generate."""
    layout, in_use, suspended = job.settings.layout, 0.0, 0.0
    for group in communicators(layout, job.world_size, bool(job.model.num_experts), job.hf.tied):
        in_pairs = group.group == PIPELINE and layout.virtual_pipeline is not None  # to the stages before and after
        size = OVERHEADS.communicator * (2 if in_pairs else 1)
        in_node = group.fits_in(job.gpus_per_node)
        in_use += size
        kept = OVERHEADS.suspended_in_node if in_node else OVERHEADS.suspended_network
        suspended += size * (1 if in_pairs else kept)
    return in_use, suspended if job.settings.training.suspend_communicators else in_use


def _has_optimizer(job: PlannedJob, sub_phase: SubPhase) -> bool:
    """Return whether what the optimizer keeps on the device is there."""
    settings = job.settings
    if settings.model.offloads and settings.optimizer.offload == "none":
        return sub_phase is not SubPhase.START  # the policy is not built yet
    return not settings.model.offloads or RESIDENT[sub_phase].optimizer


def _temporary_memory(job: PlannedJob, stage: int, sub_phase: SubPhase) -> dict[str, float]:
    """Return what a sub-phase allocates and frees again."""
    per_parameter = job.per_parameter
    largest_tensor = _largest_tensor(job.model, job.settings.layout.tensor)
    if sub_phase is SubPhase.LOGPROB:
        reference = largest_tensor * per_parameter.weights if job.has_reference else 0.0
        layer, head = forward_bytes(job, stage), logits_bytes(job, stage, backward=False)
        # What the layers make is gone when the head begins.
        return {"activations": max(0.0, layer - head), "logits": head, "reference": reference}
    if sub_phase is SubPhase.TRAIN:
        head = logits_bytes(job, stage, backward=True)
        return {"activations": activation_bytes(job, stage, head), "logits": head}
    if sub_phase is SubPhase.OPTIMIZER:
        sharded = job.sharded_parameters(job.parameter_counts[stage])
        piece = min(job.settings.optimizer.piece_bytes, sharded * per_parameter.host_optimizer)
        return {"float32 gradients": sharded * per_parameter.fp32_gradients, "optimizer pieces": 2 * piece}
    if sub_phase is SubPhase.SYNC:
        vocabulary = job.model.vocab_size * job.model.hidden_size * per_parameter.weights  # an engine loads it at once
        largest_round = max(job.settings.sync.bucket_bytes / ROUNDS_IN_MEMORY, vocabulary)
        return {"sync rounds": largest_round * (ROUNDS_IN_MEMORY if job.world_size > 1 else 1)}  # one shares, no more
    return {}


def _largest_tensor(model: ModelShape, tensor: int) -> float:
    """Return the elements, on one of `tensor` ranks, of the output layer or the largest matrix of a layer."""
    rows = max(model.vocab_size, 2 * model.ffn_hidden_size, 2 * model.moe_ffn_hidden_size)
    return rows / tensor * model.hidden_size


def _host_memory(job: PlannedJob, engine: EngineMemory) -> dict[SubPhase, BytesByKind]:
    """Return the memory of the fullest node in each sub-phase. A node may hold ranks of several stages."""
    nodes = set()
    for start in range(0, job.world_size, job.gpus_per_node):
        ranks = range(start, start + job.gpus_per_node)
        nodes.add(tuple(coordinates(rank, job.settings.layout, job.world_size).pipeline for rank in ranks))

    def node_memory(stages: tuple[int, ...], sub_phase: SubPhase) -> BytesByKind:
        by_rank = [_rank_host_memory(job, sub_phase, stage, engine) for stage in stages]
        return {kind: sum(sizes[kind] for sizes in by_rank) for kind in by_rank[0]}

    return {sub_phase: max((node_memory(node, sub_phase) for node in nodes), key=total_bytes) for sub_phase in SubPhase}


def _rank_host_memory(job: PlannedJob, sub_phase: SubPhase, stage: int, engine: EngineMemory) -> dict[str, float]:
    count, per_parameter = job.parameter_counts[stage], job.per_parameter
    sharded = job.sharded_parameters(count)
    sizes = {
        "processes": OVERHEADS.trainer_process + OVERHEADS.engine_process,
        "weights": count.total * per_parameter.host_copies,
        "reference": count.total * per_parameter.weights * job.has_reference,
        "optimizer": sharded * per_parameter.host_optimizer * (sub_phase is not SubPhase.START),
        "checkpoint": _checkpoint_host_bytes(job, sub_phase),
        "export": SHARD_BYTES
        * (sub_phase is SubPhase.SAVE and job.settings.run.export_every > 0),  # while it is written
    }
    if job.settings.training.router_replay != "none":
        sizes["routed experts"] = _routed_expert_bytes(job, sub_phase, engine)
    if sub_phase in (SubPhase.START, SubPhase.LOAD):
        sizes["weights"] = 0.0
    elif job.settings.optimizer.offload == "step":  # the pinned copy stays while the optimizer is on the device
        sizes["optimizer"] += sharded * per_parameter.optimizer * job.settings.model.offloads
    if job.settings.model.offloads and not RESIDENT[sub_phase].communicators:
        in_use, suspended = communicator_bytes(job)
        sizes["communicators"] = in_use - suspended
    return sizes


def _routed_expert_bytes(job: PlannedJob, sub_phase: SubPhase, engine: EngineMemory) -> float:
    """Return a rank's part of the experts to replay, and SGLang's own: int32 for all layers and slots of its cache."""
    model, replay = job.model, job.settings.training.router_replay
    tokens = job.settings.samples_per_step * job.mean_seq_len / job.world_size
    first = SubPhase.GENERATE if replay == "R3" else SubPhase.LOGPROB
    is_kept = sub_phase in tuple(SubPhase)[tuple(SubPhase).index(first) : tuple(SubPhase).index(SubPhase.OFFLOAD)]
    kept = tokens * model.num_moe_layers * model.experts_per_token * expert_id_bytes(model.num_experts) * is_kept
    slots = engine.kv_cache_tokens / job.engine_parallelism.replicas * (replay == "R3")
    return kept + 4 * slots * model.num_layers * model.experts_per_token


def _checkpoint_host_bytes(job: PlannedJob, sub_phase: SubPhase) -> float:
    """Return what a save or load holds beside the state: a piece of one tensor.

    A save has one where it comes from a device. So has a load; on a CPU only one of another layout's checkpoint, which
    may have been saved without tensor parallelism.
    """
    settings = job.settings
    in_background = settings.optimizer.offload == "none" and settings.run.async_save and sub_phase in BESIDE_A_SAVE
    from_device = settings.model.offloads and (sub_phase is SubPhase.SAVE or in_background)
    loads = sub_phase is SubPhase.LOAD
    largest_piece = min(
        settings.run.piece_bytes, 4 * _largest_tensor(job.model, 1 if loads else settings.layout.tensor)
    )
    return largest_piece * (from_device or loads)
