"""What one GPU computes and moves in a step, and how long that takes at best and as expected."""

from dataclasses import dataclass, replace

from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.clusters import OVERHEADS, Cluster
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.memory import EngineMemory

GIGA = 1e9
ACTIVATION_BYTES = 2  # of an element that is sent


@dataclass(frozen=True)
class ResourceUse:
    """What one GPU does in one sub-phase of a step: FLOPs, bytes by link, and seconds that follow from no rate.

    `bubble`: seconds that a pipeline waits for each second of work. The roofline leaves out latency and bubble.
    """

    flops: float = 0.0
    fp8: bool = False
    device_bytes: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    host_link_bytes: float = 0.0
    host_copy_bytes: float = 0.0
    disk_bytes: float = 0.0  # of the node
    latency_s: float = 0.0
    bubble: float = 0.0

    def scaled(self, factor: float) -> "ResourceUse":
        """Return this use `factor` times over."""
        amounts = {name: value * factor for name, value in vars(self).items() if name not in ("fp8", "bubble")}
        return replace(self, **amounts)

    def __add__(self, other: "ResourceUse") -> "ResourceUse":
        """Add up two uses, one after the other; `fp8` and `bubble` are those of the first."""
        names = [name for name in vars(self) if name not in ("fp8", "bubble")]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class TimeEstimate:
    """`parts`: expected seconds by the resource that takes them."""

    roofline_s: float
    parts: dict[str, float]

    @property
    def expected_s(self) -> float:
        """Return the expected seconds, all resources one after the other."""
        return sum(self.parts.values())


def estimate_time(use: ResourceUse, cluster: Cluster) -> TimeEstimate:
    """Estimate the seconds of one sub-phase.

    Roofline: the slowest of all resources at its peak, everything else hidden behind it. Expected: one after the other,
    each at the share of its peak that the profile calls achievable, then bubble and latency.
    """
    peak_flops = (cluster.matmul_tflops(use.fp8) if use.flops else 1.0) * 1e12
    at_peak = {
        "matrix products": use.flops / peak_flops,
        "device memory": use.device_bytes / (cluster.device_memory_gb_s * GIGA),
        "NVLink": use.nvlink_bytes / (cluster.nvlink_gb_s * GIGA),
        "network": use.network_bytes / (cluster.network_gb_s * GIGA),
        "host link": use.host_link_bytes / (cluster.host_link_gb_s * GIGA),
        "host copies": use.host_copy_bytes / (cluster.host_copy_gb_s * GIGA),
        "disk": use.disk_bytes / (cluster.disk_gb_s * GIGA),
    }
    achievable = cluster.achievable
    shares = {"matrix products": achievable.matmul, "device memory": achievable.device_memory, "disk": 1.0}
    parts = {name: seconds / shares.get(name, achievable.link) for name, seconds in at_peak.items() if seconds}
    busy = sum(parts.values())
    parts |= {"waiting in the pipeline": busy * use.bubble} if use.bubble else {}
    parts |= {"latency": use.latency_s} if use.latency_s else {}
    return TimeEstimate(max(at_peak.values()), parts)


def forward_flops_per_token(model: ModelShape, hf: HfConfig, context_tokens: float) -> float:
    """Return two FLOPs per active parameter, and attention over half of the context."""
    attention = model.num_layers * model.num_heads * (model.qk_head_dim + model.v_head_dim) * context_tokens
    return 2.0 * active_parameters(model, hf) + attention


def active_parameters(model: ModelShape, hf: HfConfig) -> int:
    """Count the parameters that one token uses: its experts and everything else but the embedding, of which one row."""
    attention = sum(
        len(rule.layers or ()) * sum(shape[0] * shape[1] for shape in rule.shapes if len(shape) == 2)
        for rule in family_of(hf).rules(hf)
        if "self_attention" in rule.name
    )
    num_dense_layers = model.num_layers - model.num_moe_layers
    mlp_width = model.ffn_hidden_size * num_dense_layers + model.shared_expert_size * model.num_moe_layers
    router = model.num_moe_layers * model.hidden_size * model.num_experts
    routed = routed_parameters(model, model.experts_per_token)
    return attention + 3 * model.hidden_size * mlp_width + routed + router + model.hidden_size * model.vocab_size


def routed_parameters(model: ModelShape, experts: int) -> int:
    """Count the parameters of so many routed experts in every MoE layer."""
    return model.num_moe_layers * experts * 3 * model.hidden_size * model.moe_ffn_hidden_size


def logprob_use(job: PlannedJob, passes: float) -> ResourceUse:
    """Return `passes` forward passes over the samples of a step; a fraction goes over that share of them."""
    return replace(_forward_use(job).scaled(passes), bubble=_bubble(job))


def train_use(job: PlannedJob) -> ResourceUse:
    """Return all forward and backward passes of a step; full recomputation does the forward pass twice."""
    training = job.settings.training
    forward, recompute = _forward_use(job).scaled(training.epochs), training.recompute == "full"
    traffic = forward.scaled(2 + recompute)  # a backward pass has twice a forward pass's FLOPs, and as much traffic
    return replace(traffic, flops=forward.flops * (3 + recompute), bubble=_bubble(job))


def optimizer_use(job: PlannedJob, stage: int) -> ResourceUse:
    """Return the updates of a step: gradients summed over replicas, Adam, new weights gathered."""
    count, layout, per_parameter = job.parameter_counts[stage], job.settings.layout, job.per_parameter
    model_bytes = per_parameter.gradients + per_parameter.weights
    dense = count.dense * model_bytes * (1 - 1 / job.dense_shards)
    expert = count.expert * model_bytes * (1 - 1 / job.expert_shards)
    dense_in_node = layout.tensor * job.dense_shards <= job.gpus_per_node
    expert_in_node = layout.expert * layout.expert_tensor * job.expert_shards <= job.gpus_per_node
    state_bytes = per_parameter.optimizer or per_parameter.host_optimizer
    adam = job.sharded_parameters(count) * 2 * state_bytes + count.total * model_bytes
    update = ResourceUse(
        device_bytes=adam if per_parameter.optimizer else 0.0,
        host_copy_bytes=0.0 if per_parameter.optimizer else adam,
        nvlink_bytes=dense * dense_in_node + expert * expert_in_node,
        network_bytes=dense * (not dense_in_node) + expert * (not expert_in_node),
    )
    return update.scaled(job.settings.optimizer_steps_per_step)


def _forward_use(job: PlannedJob) -> ResourceUse:
    """Return one GPU's part of a forward pass over a step's samples, on the fullest stage."""
    layout, model = job.settings.layout, job.model
    padded_tokens = job.settings.samples_per_step * job.mean_seq_len * job.packing.load_factor
    tokens = padded_tokens / job.dp_size / layout.context
    flops = padded_tokens * forward_flops_per_token(model, job.hf, job.mean_seq_len) / job.world_size
    num_layers = max(len(layers) for layers in job.stage_layers)
    num_moe_layers = max(sum(model.is_moe_layer[layer] for layer in layers) for layers in job.stage_layers)
    token_bytes = model.hidden_size * ACTIVATION_BYTES
    # Gathers and scatters of sequence parallelism around attention and dense or shared MLPs.
    nvlink, network = 4 * num_layers * tokens * token_bytes * (layout.tensor - 1) / layout.tensor, 0.0
    heads = model.num_heads if model.mla_cache_dim else model.num_kv_heads
    kv_elements = heads * (model.qk_head_dim + model.v_head_dim) / layout.tensor  # of a token, in one layer
    ring = tokens * num_layers * kv_elements * ACTIVATION_BYTES * (layout.context - 1)
    if layout.tensor * layout.context <= job.gpus_per_node:
        nvlink += ring
    else:
        network += ring
    sequence_shard = tokens / layout.tensor
    all_to_all = 2 * num_moe_layers * sequence_shard * model.experts_per_token * token_bytes * layout.expert_tensor
    expert_group = layout.expert * layout.expert_tensor
    to_other_nodes = max(0.0, 1 - job.gpus_per_node / expert_group)
    in_node = max(0.0, (1 - 1 / expert_group) - to_other_nodes)
    between_stages = sequence_shard * token_bytes if layout.pipeline > 1 else 0.0
    return ResourceUse(
        flops=flops,
        nvlink_bytes=nvlink + all_to_all * in_node,
        network_bytes=network + all_to_all * to_other_nodes + between_stages,
    )


def _bubble(job: PlannedJob) -> float:
    """Return the seconds a pipeline waits for each second of work: it fills and drains once in every update."""
    layout = job.settings.layout
    imbalance = max(len(layers) for layers in job.stage_layers) * layout.pipeline / job.model.num_layers
    fill = (layout.pipeline - 1) / (layout.virtual_pipeline or 1) / job.packing.microbatches
    return (1 + fill) * imbalance - 1


@dataclass(frozen=True)
class GenerationPlan:
    """Decoding work of one engine in one step."""

    samples: float
    running_per_replica: float  # sequences at a time
    decode_steps: float  # those of the longest response included


def plan_generation(job: PlannedJob, engine: EngineMemory) -> GenerationPlan:
    """Count decode steps: responses of the mean length in waves, but at least those of the longest response."""
    rollout, args = job.settings.rollout, job.settings.engine.args
    samples = job.settings.samples_per_step / job.num_engines
    in_flight = job.settings.engine.concurrent_groups * rollout.group_size
    limit = float(args.get("max_running_requests") or in_flight)
    running = max(1.0, min(samples, in_flight, limit, engine.kv_cache_tokens / job.mean_seq_len))
    decode_steps = max(rollout.max_response_tokens, samples / running * job.mean_response_tokens)
    return GenerationPlan(samples, running / job.engine_parallelism.replicas, decode_steps)


def generation_use(job: PlannedJob, engine: EngineMemory) -> ResourceUse:
    """Return the use of one GPU of an engine: prefill of its prompts, and every decode step."""
    model, plan, parallelism = job.model, plan_generation(job, engine), job.engine_parallelism
    rollout, gpus = job.settings.rollout, parallelism.gpus
    tokens = plan.samples * job.mean_response_tokens / gpus
    prompt_tokens = plan.samples / rollout.group_size * rollout.max_prompt_tokens / 2 / gpus
    weights = _weight_bytes_per_step(job, engine, plan.running_per_replica * parallelism.replicas)
    context_tokens = plan.samples * job.mean_response_tokens * job.mean_seq_len / 2
    # Dispatch in FP8, combine in bfloat16.
    all_to_all = model.experts_per_token * model.hidden_size * 3 * model.num_moe_layers * tokens
    to_other_nodes = max(0.0, 1 - job.gpus_per_node / parallelism.expert)
    # Kernel launches of a layer, and its small collectives.
    layer_s = OVERHEADS.decode_layer_s + (2 if gpus > 1 else 0) * OVERHEADS.decode_collective_s
    all_reduce = 4 * model.num_layers * model.hidden_size * tokens * parallelism.attention_tensor
    return ResourceUse(
        flops=(tokens + prompt_tokens) * forward_flops_per_token(model, job.hf, job.mean_seq_len),
        fp8=job.engine_uses_fp8,
        device_bytes=plan.decode_steps * weights + context_tokens * engine.bytes_per_token / parallelism.replicas,
        nvlink_bytes=all_reduce * (parallelism.attention_tensor > 1)
        + all_to_all * (1 - to_other_nodes) * (parallelism.expert > 1),
        network_bytes=all_to_all * to_other_nodes,
        latency_s=plan.decode_steps * model.num_layers * layer_s,
    )


def _weight_bytes_per_step(job: PlannedJob, engine: EngineMemory, running: float) -> float:
    """Return the bytes of a GPU's weights that one decode step reads: few sequences do not use every expert."""
    model = job.model
    if not model.num_experts:
        return engine.weights
    used = 1 - (1 - model.experts_per_token / model.num_experts) ** running
    routed = routed_parameters(model, model.num_experts)
    rest = active_parameters(model, job.hf) - routed_parameters(model, model.experts_per_token)
    routed_share = routed / (routed + rest)
    return engine.weights * (routed_share * used + 1 - routed_share)
