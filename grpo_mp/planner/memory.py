"""Memory by kind (weights, gradients, KV cache, ...) on a rank's device and on a node's host, in each sub-phase."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from grpo_mp.checkpoint.chunk_files import PIECE_BYTES
from grpo_mp.checkpoint.hf_writer import SHARD_BYTES
from grpo_mp.config.sections import RunConfig
from grpo_mp.distributed.coordinates import PIPELINE, communicators, coordinates
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.families import family_of
from grpo_mp.planner.activations import activation_bytes, forward_bytes, logits_bytes
from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import EngineMemory, engine_memory, served_memory
from grpo_mp.planner.engine_use import check_lengths, sync_round_bytes
from grpo_mp.planner.job import PlannedJob
from grpo_mp.policy.parameter_bytes import OPTIMIZER_PIECE_BYTES
from grpo_mp.rollout.engine_layout import engine_host_ranks, engine_placements
from grpo_mp.rollout.routed_experts import KEY_BYTES
from grpo_mp.utils.phases import TRAINER, Phase, Residency
from grpo_mp.utils.types import expert_id_bytes
from grpo_mp.weight_sync.plan import ROUNDS_IN_MEMORY

BytesByKind = Mapping[str, float]
ROTARY_TABLES = 32  # lru_cache(maxsize=32) of Megatron's RotaryEmbedding.forward and YarnRotaryEmbedding.forward


class SubPhase(StrEnum):
    """A phase, or a part of a phase, during which memory use is constant."""

    START = "start"
    LOAD = "load"
    GENERATE = "generate"
    SCORE = "score"
    LOGPROB = "logprob"
    TRAIN = "train"
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"
    SYNC = "sync"
    CHECK = "check"
    SAVE = "save"


# Objects on the device. Before the first step the engines start; then they sleep while the policy loads.
RESIDENT = {
    SubPhase.START: Residency(engine_weights=True, engine_cache=True),
    SubPhase.LOAD: replace(TRAINER, gradients=True, optimizer=True),
    SubPhase.OPTIMIZER: Phase.TRAIN.resident,
    SubPhase.OFFLOAD: Phase.TRAIN.resident,
    **{SubPhase[phase.name]: phase.resident for phase in Phase if phase.name in SubPhase.__members__},
}
SFT_PHASES = (SubPhase.LOAD, SubPhase.TRAIN, SubPhase.OPTIMIZER, SubPhase.SAVE)
BEFORE_TRAINING = (SubPhase.START, SubPhase.LOAD)
BESIDE_A_SAVE = (SubPhase.GENERATE, SubPhase.SCORE, SubPhase.LOGPROB)
ALL_RESIDENT = Residency(
    True, True, gradients=True, optimizer=True, engine_weights=True, engine_cache=True, reward_model=True
)
# A rank that only trains waits while engines generate, and offloads nothing.
ONLY_TRAINER = replace(ALL_RESIDENT, engine_weights=False, engine_cache=False, reward_model=False)
NOT_OF_A_TRAINER = (SubPhase.GENERATE, SubPhase.OFFLOAD)
ROUNDS_OF_AN_ENGINE = ROUNDS_IN_MEMORY - 1  # received, joined, and loaded; an engine rank sends none
ROUNDS_OF_A_TRAINER = 2  # being sent, and packed to be sent next


class Occupant(NamedTuple):
    """An object on a device. `part`: field of Residency that is true while the object is there; `size` in bytes."""

    kind: str
    part: str
    size: float


@dataclass(frozen=True)
class MemoryPlan:
    """Memory by kind [bytes] in each sub-phase.

    `device`: of one rank per pipeline stage. `engine_device`: of a GPU that only runs an engine; empty if training
    ranks host the engines. `host`: of the node with the most memory in use.
    """

    device: tuple[Mapping[SubPhase, BytesByKind], ...]
    engine_device: Mapping[SubPhase, BytesByKind]
    host: Mapping[SubPhase, BytesByKind]
    engine: EngineMemory


def plan_memory(job: PlannedJob) -> MemoryPlan:
    """Plan the memory of a job on devices and hosts."""
    engine = engine_memory(job)
    device = tuple(device_memory(job, stage, engine) for stage in range(len(job.stage_layers)))
    shares = job.settings.shares_devices or job.trains_only
    return MemoryPlan(device, {} if shares else engine_device_memory(job, engine), host_memory(job, engine), engine)


def total_bytes(sizes: BytesByKind) -> float:
    """Return the sum over all kinds."""
    return sum(sizes.values())


def device_memory(job: PlannedJob, stage: int, engine: EngineMemory) -> dict[SubPhase, BytesByKind]:
    """Return the device memory by kind of a training rank of `stage`, in each sub-phase."""
    shared = job.settings.shares_devices
    processes = 1 + shared + len(served_memory(job))
    in_use, suspended = communicator_bytes(job)
    memory: dict[SubPhase, BytesByKind] = {}
    for sub_phase in SFT_PHASES if job.trains_only else SubPhase:
        if not shared and sub_phase in NOT_OF_A_TRAINER:
            continue
        resident = _resident(job, sub_phase)
        trainer = _present(_trainer_occupants(job, stage), resident) | _temporary_memory(job, stage, sub_phase)
        communication = in_use if resident.communicators else suspended
        sizes = {
            "contexts": processes * OVERHEADS.cuda_context,
            "communication": communication + engine.communication * shared,
            "key buffer": engine.key_buffer * shared,
            **trainer,
            "rotary tables": rotary_table_bytes(job, stage) * (sub_phase not in BEFORE_TRAINING),
            "fragments": OVERHEADS.fragmentation * total_bytes(trainer),
            **_present(_engine_occupants(engine), resident),
            **_present(_served_occupants(job), resident),
        }
        memory[sub_phase] = {kind: size for kind, size in sizes.items() if size}
    return memory


def rotary_table_bytes(job: PlannedJob, stage: int) -> float:
    """Return the bytes of the rotary tables that Megatron caches on one GPU, an upper bound.

    All layers share the float32 tables of the last ROTARY_TABLES sequence lengths; each is counted at the longest
    sequence's length. Fused latent attention has a cosine and a sine table in bfloat16 for each layer instead.
    """
    family = family_of(job.hf)
    values = family.config(job.hf)
    bytes_per_angle = 4 * ROTARY_TABLES
    if job.model.mla_cache_dim:
        width = values["qk_pos_emb_head_dim"]
        bytes_per_angle = max(bytes_per_angle, 2 * 2 * len(job.stage_layers[stage]))
    else:
        width = values["kv_channels"] * family.rotary(job.hf).get("rotary_percent", 1.0)
    return bytes_per_angle * width * job.settings.rollout.max_sequence_tokens


def _present(occupants: Iterator[Occupant], resident: Residency) -> dict[str, float]:
    return {each.kind: each.size for each in occupants if getattr(resident, each.part)}


def _trainer_occupants(job: PlannedJob, stage: int) -> Iterator[Occupant]:
    for prefix, model in job.models.items():
        trained = model.policy_trained_counts[stage]
        per_parameter = model.per_parameter
        state = model.sharded_parameters(trained) * per_parameter.optimizer
        yield Occupant(f"{prefix}weights", "policy_weights", model.weight_bytes[stage])
        yield Occupant(f"{prefix}gradients", "gradients", trained.total * per_parameter.gradients)
        yield Occupant(f"{prefix}optimizer", "optimizer", state)


def _engine_occupants(engine: EngineMemory) -> Iterator[Occupant]:
    yield Occupant("engine weights", "engine_weights", engine.weights)
    yield Occupant("draft weights", "engine_weights", engine.draft_weights)
    yield Occupant("KV cache", "engine_cache", engine.kv_cache)
    yield Occupant("draft KV cache", "engine_cache", engine.draft_kv_cache)
    yield Occupant("states", "engine_cache", engine.states)
    yield Occupant("CUDA graphs", "engine_cache", engine.cuda_graphs)


def _served_occupants(job: PlannedJob) -> Iterator[Occupant]:
    for name, (weights, cache) in served_memory(job).items():
        yield Occupant(name, "reward_model", weights)
        yield Occupant(f"{name}'s cache", "reward_model", cache)


def _resident(job: PlannedJob, sub_phase: SubPhase) -> Residency:
    if job.offloads:
        stays = job.optimizer_offload == "none" and sub_phase is not SubPhase.START
        return replace(RESIDENT[sub_phase], optimizer=stays or RESIDENT[sub_phase].optimizer)
    if job.settings.shares_devices:
        return ALL_RESIDENT
    return Residency(communicators=True) if sub_phase is SubPhase.START else ONLY_TRAINER


def engine_device_memory(job: PlannedJob, engine: EngineMemory) -> dict[SubPhase, BytesByKind]:
    """Return the device memory by kind of a GPU that only runs an engine.

    The rank that hosts the engine also has a process on this GPU, for the weight sync.
    """
    sizes = {
        "contexts": 2 * OVERHEADS.cuda_context,
        "communication": OVERHEADS.communicator + engine.communication,
        "key buffer": engine.key_buffer,
        **_present(_engine_occupants(engine), ALL_RESIDENT),
    }
    staged = sync_round_bytes(job) * ROUNDS_OF_AN_ENGINE
    while_syncing = {"sync rounds": staged, "fragments": OVERHEADS.fragmentation * staged}
    return {SubPhase.GENERATE: sizes, SubPhase.SYNC: sizes | while_syncing}


def communicator_bytes(job: PlannedJob) -> tuple[float, float]:
    """Return the bytes of the trainer's NCCL communicators on one device: in use, and suspended during generation."""
    layout = job.settings.layout
    suspended = 0.0
    # A rank that only trains has one more communicator, of all ranks of the job, for the weight sync.
    in_use = 0.0 if job.settings.shares_devices else OVERHEADS.communicator
    for group in communicators(layout, job.train_ranks, bool(job.model.num_experts), job.hf.tied or job.hf.trains_mtp):
        in_pairs = group.group == PIPELINE and layout.virtual_pipeline  # one communicator per neighbouring stage
        size = OVERHEADS.communicator * (2 if in_pairs else 1)
        in_node = group.fits_in(job.gpus_per_node)
        in_use += size
        kept = OVERHEADS.suspended_in_node if in_node else OVERHEADS.suspended_network
        suspended += size * (1 if in_pairs else kept)
    suspends = job.settings.shares_devices
    return in_use, suspended if suspends else in_use


def _temporary_memory(job: PlannedJob, stage: int, sub_phase: SubPhase) -> dict[str, float]:
    """Return the device memory by kind that a sub-phase allocates and frees again."""
    per_parameter = job.per_parameter
    if sub_phase is SubPhase.LOGPROB:
        swapped = min(_largest_tensor(job.model, job.settings.layout.tensor), job.policy_trained_counts[stage].total)
        layer = forward_bytes(job, stage)
        head = logits_bytes(job, stage, backward=False)
        passes = {
            "activations": max(0.0, layer - head),  # activations of the layers are free when the head runs
            "logits": head,
            "reference": swapped * per_parameter.weights * job.has_reference,
        }
        return passes | _critic_activations(job, stage, sub_phase, passes)
    if sub_phase is SubPhase.TRAIN:
        head = logits_bytes(job, stage, backward=True)
        passes = {"activations": activation_bytes(job, stage, head), "logits": head}
        return passes | _critic_activations(job, stage, sub_phase, passes)
    if sub_phase is SubPhase.OPTIMIZER:
        sharded = job.trained_share(stage)
        piece = min(OPTIMIZER_PIECE_BYTES, sharded * per_parameter.host_optimizer)
        return {"float32 gradients": sharded * per_parameter.fp32_gradients, "optimizer pieces": 2 * piece}
    if sub_phase is SubPhase.SYNC:
        rounds = ROUNDS_IN_MEMORY if job.settings.shares_devices else ROUNDS_OF_A_TRAINER
        staged = sync_round_bytes(job) * (rounds if job.world_size > 1 else 1)  # one rank sends nothing
        # The check follows: its sequences fill at least one chunk of logits.
        share = min(1.0, sum(check_lengths(job)) / job.microbatch_tokens)
        scored = max(share * forward_bytes(job, stage), logits_bytes(job, stage, backward=False))
        return {"sync rounds": staged, "activations": max(0.0, scored - staged)}
    if sub_phase is SubPhase.SAVE and _exports(job.settings.run):
        # As in a sync, without the copy for the engine; a single rank has all tensors and needs no rounds.
        return {"export rounds": sync_round_bytes(job) * ROUNDS_OF_AN_ENGINE * (job.train_ranks > 1)}
    return {}


def _critic_activations(job: PlannedJob, stage: int, sub_phase: SubPhase, policy: BytesByKind) -> dict[str, float]:
    if not job.has_critic:
        return {}
    is_training = sub_phase is SubPhase.TRAIN
    needed = activation_bytes(job.critic, stage, 0.0) if is_training else forward_bytes(job.critic, stage)
    return {"critic activations": max(0.0, needed - total_bytes(policy))}


def _largest_tensor(model: ModelShape, tensor: int) -> float:
    """Return the elements per rank, with `tensor` ranks, of the output layer or the largest matrix in a layer."""
    rows = max(model.vocab_size, 2 * model.ffn_hidden_size, 2 * model.moe_ffn_hidden_size)
    return rows / tensor * model.hidden_size


def host_memory(job: PlannedJob, engine: EngineMemory) -> dict[SubPhase, BytesByKind]:
    """Return the host memory by kind of the fullest node, in each sub-phase.

    A node's ranks may be of several pipeline stages, or host engines.
    """
    nodes = set()
    hosts = engine_host_ranks(engine_placements(job.settings.engine, job.world_size, job.gpus_per_node))
    for start in range(0, job.world_size, job.gpus_per_node):
        ranks = range(start, start + job.gpus_per_node)
        nodes.add((tuple(_stage_of(job, rank) for rank in ranks), len(set(ranks).intersection(hosts))))

    def node_memory(stages: tuple[int | None, ...], hosted: int, sub_phase: SubPhase) -> BytesByKind:
        by_rank = [
            _engine_rank_host_memory(job, engine) if stage is None else _rank_host_memory(job, sub_phase, stage, engine)
            for stage in stages
        ]
        if job.settings.training.replays_engine:
            by_rank.append({"replayed choices": hosted * _kept_by_an_engines_host(job, sub_phase)})
        kinds = dict.fromkeys(kind for sizes in by_rank for kind in sizes)
        return {kind: sum(sizes.get(kind, 0) for sizes in by_rank) for kind in kinds}

    skipped = () if job.settings.shares_devices else (SubPhase.OFFLOAD,)
    return {
        sub_phase: max((node_memory(*node, sub_phase) for node in nodes), key=total_bytes)
        for sub_phase in (SFT_PHASES if job.trains_only else SubPhase)
        if sub_phase not in skipped
    }


def _stage_of(job: PlannedJob, rank: int) -> int | None:
    """Return the pipeline stage of a rank, or None for a rank that does not train."""
    return coordinates(rank, job.settings.layout, job.train_ranks).pipeline if rank < job.train_ranks else None


def _rank_host_memory(job: PlannedJob, sub_phase: SubPhase, stage: int, engine: EngineMemory) -> dict[str, float]:
    """Return the host memory by kind of a training rank, with that of the engine it hosts."""
    shared = job.settings.shares_devices
    served = served_memory(job)
    trained = job.policy_trained_counts[stage]
    trained_bytes = trained.total * job.per_parameter.weights
    sizes = {
        "processes": OVERHEADS.trainer_process + OVERHEADS.engine_process * (shared + len(served)),
        "reference": trained_bytes * job.has_reference,
        "former weights": trained_bytes * job.settings.keeps_former_weights,
        "checkpoint": _checkpoint_host_bytes(job, sub_phase),
        "export": _export_host_bytes(job) * (sub_phase is SubPhase.SAVE and _exports(job.settings.run)),
        "engine weights": _backup_bytes(job, engine) * shared,
        "draft weights": engine.draft_weights * shared,
        # The memory saver copies the graphs' buffers to pinned memory when an engine sleeps, and keeps this memory.
        "CUDA graphs": engine.cuda_graphs * (job.offloads and sub_phase is not SubPhase.START),
        **{name: weights for name, (weights, _) in served.items()},  # the host copy stays while a model is awake
    }
    has_begun = sub_phase not in BEFORE_TRAINING
    for prefix, model in job.models.items():
        per_parameter = model.per_parameter
        sharded = model.sharded_parameters(model.policy_trained_counts[stage])
        copies = per_parameter.host_copies / per_parameter.weights
        # The pinned host buffer stays while the optimizer is on the device.
        pinned = per_parameter.optimizer * (has_begun and job.offloads and job.optimizer_offload == "step")
        state = per_parameter.host_optimizer * (sub_phase is not SubPhase.START) + pinned
        sizes[f"{prefix}weights"] = model.weight_bytes[stage] * copies * shared * has_begun
        sizes[f"{prefix}optimizer"] = sharded * state
    if job.settings.training.router_replay != "none":
        experts = _replayed_bytes(job) / job.train_ranks * has_begun + _cached_expert_bytes(job, engine) * shared
        sizes["replayed choices"] = experts
    if job.offloads and not RESIDENT[sub_phase].communicators:
        in_use, suspended = communicator_bytes(job)
        sizes["communicators"] = in_use - suspended
    return sizes


def _exports(run: RunConfig) -> bool:
    return bool(run.export) or run.export_every > 0


def _export_host_bytes(job: PlannedJob) -> float:
    weights = job.per_parameter.weights
    tensor = _largest_tensor(job.model, 1) * weights
    folder = job.parameters * weights
    stacks = stacked_expert_bytes(job)
    # A shard holds the stacked gate and up weights of a layer while the stacks of the next layer are filled.
    tensor = max(tensor, 2 / 3 * stacks)
    return stacks + min(2 * max(SHARD_BYTES, tensor) + tensor, max(tensor, folder / job.train_ranks))


def stacked_expert_bytes(job: PlannedJob) -> float:
    """Return the bytes of the experts of one layer, if exports hold them in one tensor (`stack_experts`); else 0."""
    if not family_of(job.hf).stacks_experts:
        return 0.0
    model = job.model
    return 3.0 * model.num_experts * model.moe_ffn_hidden_size * model.hidden_size * job.per_parameter.weights


def _engine_rank_host_memory(job: PlannedJob, engine: EngineMemory) -> dict[str, float]:
    """Return the host memory by kind of a rank that only hosts an engine."""
    processes = OVERHEADS.trainer_process + OVERHEADS.engine_process
    sizes = {"processes": processes, "engine weights": _backup_bytes(job, engine)}
    if job.settings.training.replays_engine:
        sizes["replayed choices"] = _cached_expert_bytes(job, engine)
    return sizes


def _backup_bytes(job: PlannedJob, engine: EngineMemory) -> float:
    return engine.weights * bool(job.settings.engine.args.get("enable_weights_cpu_backup"))


def _kept_by_an_engines_host(job: PlannedJob, sub_phase: SubPhase) -> float:
    """Return the bytes of experts and keys on an engine's host, before the host sends them to training ranks.

    Samples begun for later steps count as complete. The host of an engine on its own GPUs always holds the experts and
    keys of a full step.
    """
    has_a_step = sub_phase in (SubPhase.GENERATE, SubPhase.SCORE) or not job.settings.shares_devices
    return _replayed_bytes(job) / job.num_engines * (has_a_step + job.settings.steps_ahead)


def _replayed_bytes(job: PlannedJob) -> float:
    model = job.model
    tokens = job.settings.samples_per_step * job.mean_seq_len
    experts = model.num_moe_layers * model.experts_per_token * expert_id_bytes(model.num_experts)
    indexer = job.replayed_indexer
    return tokens * (experts + (len(indexer.layers) * indexer.topk * KEY_BYTES if indexer else 0))


def _cached_expert_bytes(job: PlannedJob, engine: EngineMemory) -> float:
    """Return the bytes that SGLang keeps for the tokens in an engine's KV cache: int32 for each layer."""
    slots = engine.kv_cache_tokens / job.engine_parallelism.replicas * job.settings.training.replays_engine
    keys = job.replayed_indexer.topk if job.replayed_indexer else 0
    return 4 * slots * job.model.num_layers * (job.model.experts_per_token + keys)


def _checkpoint_host_bytes(job: PlannedJob, sub_phase: SubPhase) -> float:
    """Return the bytes of the host buffer of a save or load: a piece of one tensor.

    A save copies tensors from the device through this buffer: weights, and optimizer state unless it is offloaded. A
    load reads rows of a tensor in pieces of the same size.
    """
    settings = job.settings
    later = job.optimizer_offload == "none" or job.saves_weights_beside
    if sub_phase not in (SubPhase.SAVE, SubPhase.LOAD) and not (later and sub_phase in BESIDE_A_SAVE):
        return 0.0
    return min(PIECE_BYTES, 4 * _largest_tensor(job.model, settings.layout.tensor))
