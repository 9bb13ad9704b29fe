"""Resource use of one GPU for the trainer's logprobs, forward and backward passes, and optimizer updates."""

from dataclasses import dataclass, replace

from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import ParameterCount
from grpo_mp.planner.resource_use import (
    ResourceUse,
    active_parameters,
    estimate_time,
    forward_flops_per_token,
    fp8_flops_per_token,
    mtp_flops_per_token,
)

ACTIVATION_BYTES = 2  # per element sent between ranks: bfloat16


@dataclass(frozen=True)
class LayerTraffic:
    """Bytes that one GPU sends in a forward pass over a step's samples, all layers together."""

    gathers: float  # sequence parallelism's all-gathers and reduce-scatters, always within a node
    ring: float  # keys and values around the context-parallel ring
    all_to_all: float  # dispatch of tokens to experts, and combine
    between_stages: float  # hidden states to the next pipeline stage


def logprob_use(job: PlannedJob, passes: float) -> ResourceUse:
    """Return the resource use of `passes` forward passes of the policy over a step's samples, and of one critic pass.

    A fractional `passes` covers that share of the samples.
    """
    policy = (_forward_products(job) + _traffic_use(job, _layer_traffic(job))).scaled(passes)
    if not job.has_critic:
        return replace(policy, bubble=_bubble(job))
    return _with_critic(
        job, policy, _critic_products(job.critic) + _traffic_use(job.critic, _layer_traffic(job.critic))
    )


def train_use(job: PlannedJob) -> ResourceUse:
    """Return the resource use of all forward and backward passes of a step, of the policy and of a critic.

    A backward pass has twice the FLOPs of a forward pass and twice its ring traffic (keys, values and their gradients);
    it also gathers the inputs of tensor-parallel layers again. Full recomputation repeats the forward pass.
    """
    epochs = job.settings.training.epochs
    policy = _passes_of_an_epoch(job, _forward_products(job)).scaled(epochs)
    if not job.has_critic:
        return replace(policy, bubble=_bubble(job))
    return _with_critic(job, policy, _passes_of_an_epoch(job.critic, _critic_products(job.critic)).scaled(epochs))


def _with_critic(job: PlannedJob, policy: ResourceUse, critic: ResourceUse) -> ResourceUse:
    """Add the critic's use; the common bubble is the total idle time divided by the total busy time."""
    busy = [estimate_time(use, job.cluster).expected_s for use in (policy, critic)]
    waiting = busy[0] * _bubble(job) + busy[1] * _bubble(job.critic)
    return replace(policy + critic, bubble=waiting / sum(busy))


def _passes_of_an_epoch(job: PlannedJob, products: ResourceUse) -> ResourceUse:
    """Return the resource use of a model's forward and backward passes in one epoch.

    `products`: FLOPs of one forward pass.
    """
    training, traffic = job.settings.training, _layer_traffic(job)
    forwards = 1 + (training.recompute == "full")
    backward = replace(traffic, ring=2 * traffic.ring, gathers=1.5 * traffic.gathers)
    # Recomputation stays within a stage, so it sends nothing between stages.
    between_stages = ResourceUse(network_bytes=traffic.between_stages * (1 - forwards))
    use = _traffic_use(job, traffic).scaled(forwards) + _traffic_use(job, backward) + between_stages
    ahead = mtp_flops_per_token(job.model, job.hf, job.attention_context) * _computed_tokens(job) / job.train_ranks
    use += (products + ResourceUse(flops=ahead)).scaled(forwards + 2)
    if job.settings.model.lora:  # the frozen weights have no weight gradients
        spared = 2.0 * active_parameters(job.model, job.hf) * _computed_tokens(job) / job.train_ranks
        use += ResourceUse(flops=-spared)
    return use


def optimizer_use(job: PlannedJob, stage: int) -> ResourceUse:
    """Return the resource use of a step's optimizer updates: reduce-scatter of gradients, Adam, all-gather of weights.

    Optimizer state on the host is copied to the device and back. Both copies count in full, although they overlap.
    """
    updates = (_updates_use(model, model.policy_trained_counts[stage]) for model in job.models.values())
    return sum(updates, ResourceUse())


def _updates_use(job: PlannedJob, count: ParameterCount) -> ResourceUse:
    """Return the resource use of the updates of one model. `count`: parameters that the rank trains."""
    layout, per_parameter = job.settings.layout, job.per_parameter
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
    per_token = forward_flops_per_token(job.model, job.hf, job.attention_context)
    tokens = _computed_tokens(job) / job.train_ranks
    return _products(job, tokens * per_token, tokens)


def _products(job: PlannedJob, flops: float, tokens: float) -> ResourceUse:
    """Split the FLOPs of a forward pass over `tokens` into model.dtype and FP8, by training.fp8_format."""
    if job.settings.training.fp8_format is None:
        return ResourceUse(flops=flops)
    in_fp8 = tokens * fp8_flops_per_token(job.model, job.hf)
    return ResourceUse(flops=flops - in_fp8, fp8_flops=in_fp8)


def _critic_products(job: PlannedJob) -> ResourceUse:
    head = 2.0 * job.model.hidden_size * job.model.vocab_size
    return _forward_products(job) + ResourceUse(flops=-_computed_tokens(job) * head / job.train_ranks)


def _layer_traffic(job: PlannedJob) -> LayerTraffic:
    """Return the traffic of a forward pass for a stage with the mean number of layers.

    `_bubble` accounts for stages with more layers than the mean.
    """
    layout, model = job.settings.layout, job.model
    tokens = _computed_tokens(job) / job.dp_size / layout.context
    num_layers, num_moe_layers = model.num_layers / layout.pipeline, model.num_moe_layers / layout.pipeline
    token_bytes, sequence_shard = model.hidden_size * ACTIVATION_BYTES, tokens / layout.tensor
    heads = model.num_heads if model.mla_cache_dim else model.num_kv_heads
    kv_bytes = heads * (model.qk_head_dim + model.v_head_dim) / layout.tensor * ACTIVATION_BYTES
    return LayerTraffic(
        gathers=4 * num_layers * tokens * token_bytes * (layout.tensor - 1) / layout.tensor,
        ring=tokens * num_layers * kv_bytes * (layout.context - 1),
        all_to_all=2 * num_moe_layers * sequence_shard * model.experts_per_token * token_bytes * layout.expert_tensor,
        between_stages=sequence_shard * token_bytes if layout.pipeline > 1 else 0.0,
    )


def _traffic_use(job: PlannedJob, traffic: LayerTraffic) -> ResourceUse:
    layout, per_node = job.settings.layout, job.gpus_per_node
    ring_in_node = layout.tensor * layout.context <= per_node
    expert_group = layout.expert * layout.expert_tensor
    to_other_nodes = max(0.0, 1 - per_node / expert_group)
    in_node = max(0.0, (1 - 1 / expert_group) - to_other_nodes)
    return ResourceUse(
        nvlink_bytes=traffic.gathers + traffic.ring * ring_in_node + traffic.all_to_all * in_node,
        network_bytes=traffic.ring * (not ring_in_node) + traffic.all_to_all * to_other_nodes + traffic.between_stages,
    )


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
