"""FLOPs and bytes of one GPU in a phase of the trainer, and the time that they need."""

from dataclasses import dataclass, replace
from math import prod

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.sparse_attention import INDEXER, INDEXER_LOSS
from grpo_mp.planner.clusters import OVERHEADS, Cluster
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import ParameterCount

GIGA = 1e9
CHUNK_TOKENS = 64  # of flash-linear-attention's kernels
TERA = 1e12


@dataclass(frozen=True)
class ResourceUse:
    """FLOPs and bytes of one GPU in one phase of a step.

    `latency_s`: fixed seconds, independent of rates. `bubble`: idle seconds of the pipeline per second of work.
    """

    flops: float = 0.0
    fp8_flops: float = 0.0
    device_bytes: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    host_link_bytes: float = 0.0
    host_copy_bytes: float = 0.0
    disk_bytes: float = 0.0  # of the whole node
    latency_s: float = 0.0
    bubble: float = 0.0

    def scaled(self, factor: float) -> "ResourceUse":
        """Return the use multiplied by `factor`; `bubble`, a ratio, stays."""
        return ResourceUse(**{name: value * factor for name, value in vars(self).items()} | {"bubble": self.bubble})

    def __add__(self, other: "ResourceUse") -> "ResourceUse":
        """Add two uses that run one after the other; keep the bubble of the first."""
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return ResourceUse(**sums | {"bubble": self.bubble})


def estimate_time(use: ResourceUse, cluster: Cluster) -> dict[str, float]:
    """Estimate the seconds of a phase by resource, each at its achievable share of the peak rate; none overlap."""
    achievable = cluster.achievable
    fp8_rate = cluster.peak_fp8_tflops() if use.fp8_flops else 1.0
    products = use.flops / TERA / cluster.bf16_tflops + use.fp8_flops / TERA / fp8_rate
    parts = {
        "matrix products": products / achievable.matmul,
        "device memory": use.device_bytes / GIGA / cluster.device_memory_gb_s / achievable.device_memory,
        "NVLink": use.nvlink_bytes / GIGA / cluster.nvlink_gb_s / achievable.link,
        "network": use.network_bytes / GIGA / cluster.network_gb_s / achievable.link,
        "host link": use.host_link_bytes / GIGA / cluster.host_link_gb_s / achievable.link,
        "host copies": use.host_copy_bytes / GIGA / cluster.host_copy_gb_s / achievable.link,
        "disk": use.disk_bytes / GIGA / cluster.disk_gb_s,
    }
    parts["waiting in the pipeline"] = sum(parts.values()) * use.bubble
    parts["latency"] = use.latency_s
    return {name: seconds for name, seconds in parts.items() if seconds}


def forward_flops_per_token(model: ModelShape, hf: HfConfig, context_tokens: float) -> float:
    """Return the forward FLOPs of a token: 2 per active parameter, plus causal attention over half of the context.

    `context_tokens`: length of the token's sequence, averaged over tokens.
    """
    attention = model.num_heads * model.attention_width * model.attended_tokens(context_tokens)
    others = 2.0 * active_parameters(model, hf, without_indexers=True) + _linear_attention_flops(model)
    return others + attention + indexer_flops_per_token(model, hf, context_tokens)


def indexer_flops_per_token(model: ModelShape, hf: HfConfig, context_tokens: float) -> float:
    """Return the forward FLOPs per token of all indexers: projections, and scores of half of the context."""
    indexer = model.indexer
    if indexer is None:
        return 0.0
    projections = active_parameters(model, hf) - active_parameters(model, hf, without_indexers=True)
    return 2.0 * projections + len(indexer.layers) * indexer.heads * indexer.head_dim * context_tokens


def waiting_flops_per_token(model: ModelShape, layout: LayoutConfig) -> float:
    """Return the forward FLOPs per token for which a rank waits, until the busiest rank has computed its experts."""
    if layout.expert == 1:
        return 0.0
    return 2.0 * (OVERHEADS.expert_wait - 1) * routed_parameters(model, model.experts_per_token)


def _linear_attention_flops(model: ModelShape) -> float:
    """Return the forward FLOPs per token of all gated delta nets, in chunks of C tokens (arXiv 2412.06464, 3.3).

    Per head: reading, erasing and writing the state, and five C^2 products within a chunk: keys and queries by keys,
    the inverse by keys and by values, and scores by values.
    """
    linear = model.linear
    if linear is None:
        return 0.0
    state = 6 * linear.key_dim * linear.value_dim
    chunk = 2 * CHUNK_TOKENS * (3 * linear.key_dim + 2 * linear.value_dim)
    return float(len(linear.layers) * linear.value_heads * (state + chunk))


def mtp_flops_per_token(model: ModelShape, hf: HfConfig, context_tokens: float) -> float:
    """Return the forward FLOPs per token of a trained multi-token-prediction layer: layer, input projection, head."""
    if not hf.trains_mtp:
        return 0.0
    parameters = sum(
        (model.experts_per_token if rule.experts else 1) * sum(prod(shape) for shape in rule.shapes if len(shape) == 2)
        for rule in family_of(hf).rules(hf)
        if model.num_layers in (rule.layers or ())
    )
    head = model.hidden_size * model.vocab_size
    attention = model.num_heads * model.attention_width * _attended_ahead(model, context_tokens)
    scores = model.indexer.heads * model.indexer.head_dim * context_tokens if model.indexer else 0
    return 2.0 * (parameters + head) + attention + scores


def _attended_ahead(model: ModelShape, context_tokens: float) -> float:
    """Return twice the mean number of keys of a query in the layer that predicts ahead, which has no window."""
    return model.attended_tokens(context_tokens) / model.num_layers if model.indexer else context_tokens


def fp8_flops_per_token(model: ModelShape, hf: HfConfig) -> float:
    """Return the forward FLOPs per token that run in FP8: all but attention scores, output layer and routers."""
    router = model.num_moe_layers * model.hidden_size * model.num_experts
    return 2.0 * (active_parameters(model, hf) - model.hidden_size * model.vocab_size - router)


def active_parameters(model: ModelShape, hf: HfConfig, without_indexers: bool = False) -> int:
    """Count the parameters that one token uses: everything but the embedding and the experts not chosen."""
    attention = sum(
        len(rule.layers or ()) * sum(shape[0] * shape[1] for shape in rule.shapes if len(shape) == 2)
        for rule in family_of(hf).rules(replace(hf, trains_mtp=False))
        if "self_attention" in rule.name and not (without_indexers and INDEXER in rule.name)
    )
    num_dense_layers = model.num_layers - model.num_moe_layers
    mlp_width = model.ffn_hidden_size * num_dense_layers + model.shared_expert_size * model.num_moe_layers
    router = model.num_moe_layers * model.hidden_size * model.num_experts
    routed = routed_parameters(model, model.experts_per_token)
    return attention + 3 * model.hidden_size * mlp_width + routed + router + model.hidden_size * model.vocab_size


def routed_parameters(model: ModelShape, experts: int) -> int:
    """Count the parameters of `experts` routed experts per MoE layer, over all MoE layers."""
    return model.num_moe_layers * experts * 3 * model.hidden_size * model.moe_ffn_hidden_size


ACTIVATION_BYTES = 2  # per element sent between ranks: bfloat16


def logprob_use(job: PlannedJob, passes: float) -> ResourceUse:
    """Return the resource use of `passes` forward passes of the policy over a step, and of one critic pass."""
    policy = (_forward_products(job) + _traffic_use(job)).scaled(passes)
    critic = _critic_products(job.critic) + _traffic_use(job.critic) if job.has_critic else ResourceUse()
    return replace(policy + critic, bubble=_bubble(job))


def train_use(job: PlannedJob) -> ResourceUse:
    """Return the resource use of all forward and backward passes of a step, of the policy and of a critic."""
    use = _passes_of_an_epoch(job, _forward_products(job))
    if job.has_critic:
        use += _passes_of_an_epoch(job.critic, _critic_products(job.critic))
    return replace(use.scaled(job.settings.training.epochs), bubble=_bubble(job))


def _passes_of_an_epoch(job: PlannedJob, products: ResourceUse) -> ResourceUse:
    """Return the resource use of a model's forward and backward passes in one epoch.

    A backward pass has twice the FLOPs of a forward pass, without those of frozen indexers; it also gathers the
    inputs of tensor-parallel layers again, and attention computes its scores again. Full recomputation repeats the
    forward pass, but sends nothing between stages. `products`: FLOPs of one forward pass.
    """
    recomputes = job.settings.training.recompute == "full"
    tokens = _computed_tokens(job) / job.train_ranks
    use = _traffic_use(job) + _traffic_use(job, is_backward=True)
    if recomputes:
        use += _traffic_use(job, between_stages=0.0)
    model = job.model
    learns_ahead = job.hf.trains_mtp
    ahead = mtp_flops_per_token(model, job.hf, job.attention_context)
    ahead += learns_ahead * waiting_flops_per_token(model, job.settings.layout) / max(1, model.num_moe_layers)
    use += (products + ResourceUse(flops=ahead * tokens)).scaled(3 + recomputes)
    attended = model.attended_tokens(job.attention_context)
    attended += learns_ahead * _attended_ahead(model, job.attention_context)
    key_width = model.mla_cache_dim if model.indexer else model.qk_head_dim
    use += ResourceUse(flops=model.num_heads * key_width * attended * tokens)
    if not job.settings.training.megatron_args.get(INDEXER_LOSS):
        use += ResourceUse(flops=-2.0 * indexer_flops_per_token(model, job.hf, job.attention_context) * tokens)
    if job.settings.model.lora:  # the frozen weights have no weight gradients
        use += ResourceUse(flops=-2.0 * active_parameters(job.model, job.hf, without_indexers=True) * tokens)
    return use


def optimizer_use(job: PlannedJob, stage: int) -> ResourceUse:
    """Return the resource use of a step's optimizer updates: reduce-scatter of gradients, Adam, all-gather of weights.

    Optimizer state on the host is copied to the device and back. Both copies count in full, although they overlap.
    """
    updates = (_updates_use(model, model.policy_trained_counts[stage]) for model in job.models.values())
    return sum(updates, ResourceUse())


def _updates_use(job: PlannedJob, count: ParameterCount) -> ResourceUse:
    """Return the resource use of the updates of one model. `count`: parameters that the rank trains."""
    layout = job.settings.layout
    per_parameter = job.per_parameter
    model_bytes = per_parameter.gradients + per_parameter.weights
    dense = count.dense * model_bytes * (1 - 1 / job.dense_shards)
    expert = count.expert * model_bytes * (1 - 1 / job.expert_shards)
    dense_in_node = layout.tensor * job.dense_shards <= job.gpus_per_node
    expert_in_node = layout.expert * layout.expert_tensor * job.expert_shards <= job.gpus_per_node
    moved = job.sharded_parameters(count) * 2 * per_parameter.host_optimizer
    state = job.sharded_parameters(count) * 2 * (per_parameter.optimizer + per_parameter.host_optimizer)
    update = ResourceUse(
        device_bytes=state + moved + count.total * model_bytes,
        host_link_bytes=moved,
        nvlink_bytes=dense * dense_in_node + expert * expert_in_node,
        network_bytes=dense * (not dense_in_node) + expert * (not expert_in_node),
    )
    return update.scaled(job.settings.optimizer_steps_per_step)


def _computed_tokens(job: PlannedJob) -> float:
    return job.settings.samples_per_step * job.mean_seq_len * job.packing.load_factor


def _forward_products(job: PlannedJob) -> ResourceUse:
    """Return the FLOPs of a forward pass over a step's samples, in model.dtype and FP8 by training.fp8_format."""
    tokens = _computed_tokens(job) / job.train_ranks
    flops = tokens * forward_flops_per_token(job.model, job.hf, job.attention_context)
    flops += tokens * waiting_flops_per_token(job.model, job.settings.layout)
    if job.settings.training.fp8_format is None:
        return ResourceUse(flops=flops)
    in_fp8 = tokens * fp8_flops_per_token(job.model, job.hf)
    return ResourceUse(flops=flops - in_fp8, fp8_flops=in_fp8)


def _critic_products(job: PlannedJob) -> ResourceUse:
    head = 2.0 * job.model.hidden_size * job.model.vocab_size
    return _forward_products(job) + ResourceUse(flops=-_computed_tokens(job) * head / job.train_ranks)


def _traffic_use(job: PlannedJob, is_backward: bool = False, between_stages: float = 1.0) -> ResourceUse:
    """Return what one GPU sends in a forward pass over a step's samples, for a stage with the mean number of layers.

    `_bubble` accounts for stages with more layers. `is_backward`: for a backward pass; `between_stages`: a factor for
    hidden states.
    """
    layout = job.settings.layout
    model = job.model
    per_node = job.gpus_per_node
    tokens = _computed_tokens(job) / job.dp_size / layout.context
    num_layers = model.num_layers / layout.pipeline
    num_moe_layers = model.num_moe_layers / layout.pipeline
    token_bytes = model.hidden_size * ACTIVATION_BYTES
    sequence_shard = tokens / layout.tensor
    gathers = 1.5 if is_backward else 1.0
    gathered = gathers * 4 * num_layers * tokens * token_bytes * (layout.tensor - 1) / layout.tensor
    ringed = tokens * num_layers * _key_elements(model, layout.tensor, is_backward) * ACTIVATION_BYTES
    ringed *= layout.context - 1
    ring_in_node = layout.tensor * layout.context <= per_node
    # Dispatch of tokens to experts, and combine.
    routed = 2 * num_moe_layers * sequence_shard * model.experts_per_token * token_bytes * layout.expert_tensor
    expert_group = layout.expert * layout.expert_tensor
    to_other_nodes = max(0.0, 1 - per_node / expert_group)
    in_node = max(0.0, (1 - 1 / expert_group) - to_other_nodes)
    sent_on = between_stages * sequence_shard * token_bytes * (layout.pipeline > 1)
    return ResourceUse(
        nvlink_bytes=gathered + ringed * ring_in_node + routed * in_node,
        network_bytes=ringed * (not ring_in_node) + routed * to_other_nodes + sent_on,
    )


def _key_elements(model: ModelShape, tensor: int, is_backward: bool) -> float:
    """Return the elements per token and layer that a rank sends to each other context-parallel rank.

    Keys and values circulate in a ring, in a backward pass with their gradients. Sparse attention gathers latents, and
    keys of indexers, whole on each tensor rank; its backward pass reduces the gradients of latents (Megatron's
    DSAttention).
    """
    if model.indexer:
        indexed = model.indexer.head_dim * len(model.indexer.layers) / model.num_layers
        return model.mla_cache_dim + indexed * (not is_backward)
    heads = model.num_heads if model.mla_cache_dim else model.num_kv_heads
    return heads * (model.qk_head_dim + model.v_head_dim) / tensor * (2 if is_backward else 1)


def _bubble(job: PlannedJob) -> float:
    """Return the idle time of the pipeline per busy time.

    1F1B with p stages, v virtual stages and m micro-batches idles (p - 1) / (v * m) (arXiv 2104.04473, 2.2). Stages
    wait in addition for the stage with the most layers.
    """
    layout = job.settings.layout
    layers = [len(of_stage) for of_stage in job.stage_layers]
    imbalance = max(layers) * layout.pipeline / sum(layers)
    fill = (layout.pipeline - 1) / (layout.virtual_pipeline or 1) / job.packing.microbatches
    return (1 + fill) * imbalance - 1
