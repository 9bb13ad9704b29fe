"""Bytes on one rank's device and on one node's host in every phase of this trainer, by kind."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo_mp.checkpoint.hf_writer import SHARD_BYTES
from grpo_mp.config import Settings
from grpo_mp.distributed.communicators import PIPELINE, communicators
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.fp8 import AT_ONCE
from grpo_mp.planner.activations import activation_bytes, forward_bytes, logits_bytes
from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import EngineMemory, engine_memory
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import largest_adapted, largest_layer
from grpo_mp.planner.reward_memory import reward_memory, teacher_memory
from grpo_mp.planner.weight_traffic import check_lengths
from grpo_mp.rollout.placement import engine_host_ranks, engine_placements
from grpo_mp.utils.phases import TRAINER, Phase, Residency
from grpo_mp.utils.types import expert_id_bytes
from grpo_mp.weight_sync.plan import ROUNDS_IN_MEMORY
from grpo_mp.weight_sync.wire import BUCKET_BYTES

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
    CHECK = "check"
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
ALL_RESIDENT = Residency(
    True, True, gradients=True, optimizer=True, engine_weights=True, engine_cache=True, reward_model=True
)
# Of a rank that only trains. It waits while engines generate, and nothing leaves its device.
ONLY_TRAINER = replace(ALL_RESIDENT, engine_weights=False, engine_cache=False, reward_model=False)
QUANTIZATION_BYTES = 2.0 * 4 * AT_ONCE  # of what is quantized at a time: twice in float32
COMPUTING = (SubPhase.LOGPROB, SubPhase.TRAIN, SubPhase.SYNC)
NOT_OF_A_TRAINER = (SubPhase.GENERATE, SubPhase.OFFLOAD)
ROUNDS_OF_AN_ENGINE = ROUNDS_IN_MEMORY - 1  # what arrives, is joined, and is read; it sends none
ROUNDS_OF_A_TRAINER = 2  # what it sends, and has packed to send next


# The kinds of a plan that the trainer measures under one name: `device_items` of policy/offload.py.
MEASURED: Mapping[str, tuple[str, ...]] = {
    "weights": ("weights", "critic weights"),
    "gradients": ("gradients", "critic gradients"),
    "optimizer": ("optimizer", "critic optimizer"),
    "activations and buffers": (
        "activations",
        "critic activations",
        "logits",
        "reference",
        "float32 gradients",
        "optimizer pieces",
        "sync rounds",
        "export rounds",
        "quantization",
        "merged weights",
        "weights of a layer",
    ),
    "kept by the allocator": ("fragments",),
    "engine, communicators and contexts": (
        "engine weights",
        "draft weights",
        "KV cache",
        "draft KV cache",
        "CUDA graphs",
        "reward model",
        "reward model's cache",
        "teacher",
        "teacher's cache",
        "communication",
        "contexts",
    ),
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by kind: on the device of a rank of each stage, [stage][sub-phase], and on the host of the fullest node.

    `engine_device`: on a device that only an engine uses; empty where ranks that train host the engines.
    """

    device: tuple[Mapping[SubPhase, BytesByKind], ...]
    engine_device: Mapping[SubPhase, BytesByKind]
    host: Mapping[SubPhase, BytesByKind]
    engine: EngineMemory


def plan_memory(job: PlannedJob) -> MemoryPlan:
    """Plan the memory of a job."""
    engine = engine_memory(job)
    device = tuple(device_memory(job, stage, engine) for stage in range(len(job.stage_layers)))
    engine_device = {} if job.settings.shares_devices else engine_device_memory(job, engine)
    return MemoryPlan(device, engine_device, host_memory(job, engine), engine)


def total_bytes(sizes: BytesByKind) -> float:
    """Sum over kinds."""
    return sum(sizes.values())


def device_memory(job: PlannedJob, stage: int, engine: EngineMemory) -> dict[SubPhase, BytesByKind]:
    """Return what is on the device of a rank that trains, in each sub-phase."""
    trained, per_parameter = job.policy_trained_counts[stage], job.per_parameter
    in_use, suspended = communicator_bytes(job)
    memory: dict[SubPhase, BytesByKind] = {}
    shared, reward, teacher = job.settings.shares_devices, reward_memory(job), teacher_memory(job)
    for sub_phase in SubPhase:
        if not shared and sub_phase in NOT_OF_A_TRAINER:
            continue
        resident = _resident(job, sub_phase)
        trainer = {
            "weights": resident.policy_weights * _weight_bytes(job, stage, sub_phase),
            "gradients": resident.gradients * trained.total * per_parameter.gradients,
            "optimizer": resident.optimizer * job.sharded_parameters(trained) * per_parameter.optimizer,
            **_critic_memory(job, stage, resident),
        } | _temporary_memory(job, stage, sub_phase)
        if sub_phase in COMPUTING and _fp8_base(job):
            trainer["weights of a layer"] = _layer_values_bytes(job)
        communication = in_use if resident.communicators else suspended
        sizes = {
            "contexts": (1 + shared + reward.servers + teacher.servers) * OVERHEADS.cuda_context,
            "communication": communication + engine.communication * shared,
        } | trainer
        sizes["fragments"] = OVERHEADS.fragmentation * total_bytes(trainer)
        sizes["engine weights"] = resident.engine_weights * engine.weights
        sizes["draft weights"] = resident.engine_weights * engine.draft_weights
        sizes["KV cache"] = resident.engine_cache * engine.kv_cache
        sizes["draft KV cache"] = resident.engine_cache * engine.draft_kv_cache
        sizes["CUDA graphs"] = resident.engine_cache * engine.cuda_graphs
        sizes["reward model"] = resident.reward_model * reward.weights
        sizes["reward model's cache"] = resident.reward_model * reward.kv_cache
        sizes["teacher"] = resident.reward_model * teacher.weights
        sizes["teacher's cache"] = resident.reward_model * teacher.kv_cache
        memory[sub_phase] = {kind: size for kind, size in sizes.items() if size}
    return memory


def _fp8_base(job: PlannedJob) -> bool:
    lora = job.settings.model.lora
    return lora is not None and lora.base_dtype is not None


def _weight_bytes(job: PlannedJob, stage: int, sub_phase: SubPhase) -> float:
    """Return the policy's weights on a device. Megatron builds them in the model's dtype before any are in FP8."""
    if sub_phase is SubPhase.LOAD and _fp8_base(job):
        return float(job.parameter_counts[stage].total * job.per_parameter.weights)
    return job.weight_bytes[stage]


def _layer_values_bytes(job: PlannedJob) -> float:
    """Return what a linear layer, or all its experts, takes as values of FP8: these, and the largest in float32."""
    layout = job.settings.layout
    largest = largest_adapted(job.hf, layout)
    return float(job.per_parameter.weights * largest_layer(job.hf, layout) + 4 * largest)


def _critic_memory(job: PlannedJob, stage: int, resident: Residency) -> dict[str, float]:
    """Return what is of a critic on the device: it goes with the policy."""
    if not job.has_critic:
        return {}
    count, per_parameter = job.critic_count(stage), job.critic.per_parameter
    sharded = job.critic.sharded_parameters(count)
    return {
        "critic weights": resident.policy_weights * count.total * per_parameter.weights,
        "critic gradients": resident.gradients * count.total * per_parameter.gradients,
        "critic optimizer": resident.optimizer * sharded * per_parameter.optimizer,
    }


def _beyond_the_policy(job: PlannedJob, stage: int, sub_phase: SubPhase, passes: BytesByKind) -> dict[str, float]:
    """Return what passes of a critic hold beyond those of the policy, `passes`, which come before or after them."""
    if not job.has_critic:
        return {}
    is_training = sub_phase is SubPhase.TRAIN
    needed = activation_bytes(job.critic, stage, 0.0) if is_training else forward_bytes(job.critic, stage)
    return {"critic activations": max(0.0, needed - total_bytes(passes))}


def _resident(job: PlannedJob, sub_phase: SubPhase) -> Residency:
    """Return what is on the device of a rank that trains."""
    if job.offloads:
        stays = job.optimizer_offload == "none" and sub_phase is not SubPhase.START
        return replace(RESIDENT[sub_phase], optimizer=stays or RESIDENT[sub_phase].optimizer)
    if job.settings.shares_devices:
        return ALL_RESIDENT
    return Residency(communicators=True) if sub_phase is SubPhase.START else ONLY_TRAINER


def engine_device_memory(job: PlannedJob, engine: EngineMemory) -> dict[SubPhase, BytesByKind]:
    """Return what is on a device that only an engine uses: its rank has a process there, for the weight sync."""
    staged = _sync_round_bytes(job) * ROUNDS_OF_AN_ENGINE
    sizes = {
        "contexts": 2 * OVERHEADS.cuda_context,
        "communication": OVERHEADS.communicator + engine.communication,
        "engine weights": engine.weights,
        "draft weights": engine.draft_weights,
        "KV cache": engine.kv_cache,
        "draft KV cache": engine.draft_kv_cache,
        "CUDA graphs": engine.cuda_graphs,
    }
    return {
        SubPhase.GENERATE: sizes,
        SubPhase.SYNC: sizes
        | {
            "sync rounds": staged,
            "fragments": OVERHEADS.fragmentation * staged,
            "quantization": QUANTIZATION_BYTES * job.engine_uses_fp8,  # of matrices of which a part cuts a block
        },
    }


def communicator_bytes(job: PlannedJob) -> tuple[float, float]:
    """Return the bytes of the trainer's communicators on one device: in use, and while engines generate."""
    layout, in_use, suspended = job.settings.layout, 0.0, 0.0
    if not job.settings.shares_devices:
        in_use += OVERHEADS.communicator  # of all ranks of the job: to send weights
    groups = communicators(layout, job.train_ranks, bool(job.model.num_experts), job.has_copied_embedding)
    for group in groups:
        in_pairs = group.group == PIPELINE and layout.virtual_pipeline  # to the stages before and after
        size = OVERHEADS.communicator * (2 if in_pairs else 1)
        in_node = group.fits_in(job.gpus_per_node)
        in_use += size
        kept = OVERHEADS.suspended_in_node if in_node else OVERHEADS.suspended_network
        suspended += size * (1 if in_pairs else kept)
    suspends = job.settings.training.suspend_communicators and job.settings.shares_devices
    return in_use, suspended if suspends else in_use


def _temporary_memory(job: PlannedJob, stage: int, sub_phase: SubPhase) -> dict[str, float]:
    """Return what a sub-phase allocates and frees again."""
    per_parameter = job.per_parameter
    largest_tensor = _largest_tensor(job.model, job.settings.layout.tensor)
    if sub_phase is SubPhase.LOGPROB:
        swapped = min(largest_tensor, job.policy_trained_counts[stage].total)
        reference = swapped * per_parameter.weights if job.has_reference else 0.0
        layer, head = forward_bytes(job, stage), logits_bytes(job, stage, backward=False)
        # What the layers make is gone when the head begins.
        passes = {"activations": max(0.0, layer - head), "logits": head, "reference": reference}
        return passes | _beyond_the_policy(job, stage, sub_phase, passes)
    if sub_phase is SubPhase.TRAIN:
        head = logits_bytes(job, stage, backward=True)
        passes = {"activations": activation_bytes(job, stage, head), "logits": head}
        return passes | _beyond_the_policy(job, stage, sub_phase, passes)
    if sub_phase is SubPhase.OPTIMIZER:
        sharded = job.trained_share(stage)
        piece = min(job.settings.optimizer.piece_bytes, sharded * per_parameter.host_optimizer)
        return {"float32 gradients": sharded * per_parameter.fp32_gradients, "optimizer pieces": 2 * piece}
    if sub_phase is SubPhase.SYNC:
        rounds = ROUNDS_IN_MEMORY if job.settings.shares_devices else ROUNDS_OF_A_TRAINER
        staged = _sync_round_bytes(job) * (rounds if job.world_size > 1 else 1)  # one shares, no more
        # Then the policy scores the sequences of the check; they fill a chunk of logits.
        share = min(1.0, sum(check_lengths(job)) / job.microbatch_tokens)
        scored = max(share * forward_bytes(job, stage), logits_bytes(job, stage, backward=False))
        return {
            "sync rounds": staged,
            "activations": max(0.0, scored - staged),
            "quantization": QUANTIZATION_BYTES * job.engine_uses_fp8,
            "merged weights": _merged_bytes(job),
        }
    if sub_phase is SubPhase.SAVE and _exports(job.settings):
        # As the sync's, but no engine reads them; one rank has all that it writes.
        return {
            "export rounds": _sync_round_bytes(job) * ROUNDS_OF_AN_ENGINE * (job.train_ranks > 1),
            "quantization": QUANTIZATION_BYTES * job.settings.run.export_fp8,
            "merged weights": _merged_bytes(job),
        }
    return {}


def _merged_bytes(job: PlannedJob) -> float:
    """Return the bytes of the largest weight while adapters are added to it: it and the sum in float32."""
    lora = job.settings.model.lora
    return 2.0 * 4 * largest_adapted(job.hf, job.settings.layout, lora.targets) if lora else 0.0


def _sync_round_bytes(job: PlannedJob) -> float:
    """Return the bytes of the largest round of the weight sync."""
    model, row = job.model, job.model.hidden_size * job.per_parameter.weights
    # A slice of an expert has room around it for what the engine takes for the rest.
    expert = model.moe_ffn_hidden_size * row if job.engine_parallelism.expert_tensor > 1 else 0
    # What an engine loads at once.
    largest = max(model.vocab_size, 2 * model.ffn_hidden_size, 3 * model.moe_ffn_hidden_size) * row
    return max((job.settings.sync.bucket_bytes or BUCKET_BYTES) / ROUNDS_IN_MEMORY, largest) + expert


def _largest_tensor(model: ModelShape, tensor: int) -> float:
    """Return the elements, on one of `tensor` ranks, of the output layer or the largest matrix of a layer."""
    rows = max(model.vocab_size, 2 * model.ffn_hidden_size, 2 * model.moe_ffn_hidden_size)
    return rows / tensor * model.hidden_size


def host_memory(job: PlannedJob, engine: EngineMemory) -> dict[SubPhase, BytesByKind]:
    """Return the memory of the fullest node in each sub-phase. A node may hold several stages, and engines."""
    nodes, hosts = set(), engine_host_ranks(engine_placements(job.settings.engine, job.world_size, job.gpus_per_node))
    for start in range(0, job.world_size, job.gpus_per_node):
        ranks = range(start, start + job.gpus_per_node)
        nodes.add((tuple(_stage_of(job, rank) for rank in ranks), len(set(ranks).intersection(hosts)), start == 0))

    def node_memory(node: tuple[tuple[int | None, ...], int, bool], sub_phase: SubPhase) -> BytesByKind:
        stages, hosted, is_first = node
        by_rank = [
            engine_host_memory(job, engine) if stage is None else _rank_host_memory(job, sub_phase, stage, engine)
            for stage in stages
        ]
        if job.settings.training.router_replay == "R3":
            by_rank.append({"routed experts": hosted * _kept_by_an_engines_host(job, sub_phase)})
        if is_first and sub_phase is SubPhase.SAVE and job.settings.model.lora and _exports(job.settings):
            by_rank.append({"export": _more_for_adapters(job)})
        kinds = dict.fromkeys(kind for sizes in by_rank for kind in sizes)
        return {kind: sum(sizes.get(kind, 0) for sizes in by_rank) for kind in kinds}

    return {
        sub_phase: max((node_memory(node, sub_phase) for node in nodes), key=total_bytes)
        for sub_phase in SubPhase
        if job.settings.shares_devices or sub_phase is not SubPhase.OFFLOAD
    }


def _stage_of(job: PlannedJob, rank: int) -> int | None:
    """Return the pipeline stage of a rank; None: it does not train."""
    return coordinates(rank, job.settings.layout, job.train_ranks).pipeline if rank < job.train_ranks else None


def _rank_host_memory(job: PlannedJob, sub_phase: SubPhase, stage: int, engine: EngineMemory) -> dict[str, float]:
    """Return the memory of a rank that trains, with that of its engine where it hosts one."""
    per_parameter, shared = job.per_parameter, job.settings.shares_devices
    trained, reward, teacher = job.policy_trained_counts[stage], reward_memory(job), teacher_memory(job)
    sharded = job.sharded_parameters(trained)
    sizes = {
        "processes": OVERHEADS.trainer_process + OVERHEADS.engine_process * (shared + reward.servers + teacher.servers),
        "weights": job.weight_bytes[stage] * (per_parameter.host_copies / per_parameter.weights) * shared,
        "reference": trained.total * per_parameter.weights * job.has_reference,
        "former weights": trained.total * per_parameter.weights * job.settings.keeps_former_weights,
        "optimizer": sharded * per_parameter.host_optimizer * (sub_phase is not SubPhase.START),
        "checkpoint": _checkpoint_host_bytes(job, sub_phase),
        "export": _export_host_bytes(job) * (sub_phase is SubPhase.SAVE and _exports(job.settings)),
        "engine weights": _backup_bytes(job, engine) * shared,
        "draft weights": engine.draft_weights * shared,
        "reward model": reward.weights,  # its copy stays while it is awake
        "teacher": teacher.weights,
        **_critic_host_memory(job, sub_phase, stage),
    }
    if job.settings.training.router_replay != "none":
        sizes["routed experts"] = (
            _routed_expert_bytes(job, sub_phase) + _engine_routed_expert_bytes(job, engine) * shared
        )
    if sub_phase in (SubPhase.START, SubPhase.LOAD):
        sizes["weights"] = 0.0
    elif job.optimizer_offload == "step":  # the pinned copy stays while the optimizer is on the device
        sizes["optimizer"] += sharded * per_parameter.optimizer * job.offloads
    if job.offloads and not RESIDENT[sub_phase].communicators:
        in_use, suspended = communicator_bytes(job)
        sizes["communicators"] = in_use - suspended
    return sizes


def _critic_host_memory(job: PlannedJob, sub_phase: SubPhase, stage: int) -> dict[str, float]:
    """Return what a rank keeps of a critic on the host, as of the policy."""
    if not job.has_critic:
        return {}
    count, per_parameter = job.critic_count(stage), job.critic.per_parameter
    sharded, has_begun = job.critic.sharded_parameters(count), sub_phase not in (SubPhase.START, SubPhase.LOAD)
    moves = has_begun and job.optimizer_offload == "step" and job.offloads
    state = per_parameter.host_optimizer * (sub_phase is not SubPhase.START) + per_parameter.optimizer * moves
    return {
        "critic weights": count.total * per_parameter.host_copies * job.settings.shares_devices * has_begun,
        "critic optimizer": sharded * state,
    }


def _exports(settings: Settings) -> bool:
    return settings.run.export or settings.run.export_every > 0


def _export_host_bytes(job: PlannedJob) -> float:
    """Return what a rank holds of the folder that it exports: two shards and the tensor after them, or less."""
    weights = job.per_parameter.weights
    tensor, folder = _largest_tensor(job.model, 1) * weights, (job.parameters - job.adapters) * weights
    return min(2 * max(SHARD_BYTES, tensor) + tensor, max(tensor, folder / job.train_ranks))


def _more_for_adapters(job: PlannedJob) -> float:
    """Return what rank 0, which holds all adapters before the weights are exported, needs beyond those."""
    return max(0.0, job.adapters * job.per_parameter.weights - _export_host_bytes(job))


def engine_host_memory(job: PlannedJob, engine: EngineMemory) -> dict[str, float]:
    """Return the memory of a rank that only hosts an engine."""
    processes = OVERHEADS.trainer_process + OVERHEADS.engine_process
    sizes = {"processes": processes, "engine weights": _backup_bytes(job, engine)}
    if job.settings.training.router_replay == "R3":
        sizes["routed experts"] = _engine_routed_expert_bytes(job, engine)
    return sizes


def _backup_bytes(job: PlannedJob, engine: EngineMemory) -> float:
    """Return what an engine keeps of its weights on the host, if it does."""
    return engine.weights * bool(job.settings.engine.args.get("enable_weights_cpu_backup"))


def _routed_expert_bytes(job: PlannedJob, sub_phase: SubPhase) -> float:
    """Return what a rank that trains keeps of the experts to replay, its own share, where it has them."""
    comes_with_samples = job.settings.training.router_replay == "R3"
    phases = tuple(SubPhase)
    first = phases.index(SubPhase.SCORE if comes_with_samples else SubPhase.LOGPROB)
    is_kept = sub_phase in phases[first : phases.index(SubPhase.OFFLOAD)]
    return _replayed_bytes(job) / job.train_ranks * is_kept


def _kept_by_an_engines_host(job: PlannedJob, sub_phase: SubPhase) -> float:
    """Return what the rank that talks to an engine keeps of all its samples: of a step, till it has sent them.

    Samples begun for later steps are counted as if they had ended. An engine with GPUs of its own always has a step's.
    """
    has_a_step = sub_phase in (SubPhase.GENERATE, SubPhase.SCORE) or not job.settings.shares_devices
    return _replayed_bytes(job) / job.num_engines * (has_a_step + job.settings.steps_ahead)


def _replayed_bytes(job: PlannedJob) -> float:
    """Return the experts to replay of a step's samples."""
    model = job.model
    tokens = job.settings.samples_per_step * job.mean_seq_len
    return tokens * model.num_moe_layers * model.experts_per_token * expert_id_bytes(model.num_experts)


def _engine_routed_expert_bytes(job: PlannedJob, engine: EngineMemory) -> float:
    """Return SGLang's own of R3: int32 for all layers and slots of its cache."""
    slots = engine.kv_cache_tokens / job.engine_parallelism.replicas * (job.settings.training.router_replay == "R3")
    return 4 * slots * job.model.num_layers * job.model.experts_per_token


def _checkpoint_host_bytes(job: PlannedJob, sub_phase: SubPhase) -> float:
    """Return what a save or load holds beside the state: a piece of one tensor.

    A save has it where it comes from a device: its weights, and a state that stays there, both through the same
    memory. A load reads so many rows at a time.
    """
    settings = job.settings
    later = settings.run.async_save and (job.optimizer_offload == "none" or job.saves_weights_beside)
    if sub_phase not in (SubPhase.SAVE, SubPhase.LOAD) and not (later and sub_phase in BESIDE_A_SAVE):
        return 0.0
    return min(settings.run.piece_bytes, 4 * _largest_tensor(job.model, settings.layout.tensor))
