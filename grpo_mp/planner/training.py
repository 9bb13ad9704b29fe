"""FLOPs and traffic of one GPU while it computes logprobs, trains and updates."""

from dataclasses import replace

from grpo_mp.models.families import family_of
from grpo_mp.planner.job import Job
from grpo_mp.planner.resource_use import ResourceUse

ACTIVATION_BYTES = 2  # of an element that is sent


def forward_flops_per_token(job: Job, context_tokens: float) -> float:
    """Return two FLOPs per active parameter, and attention over half of the context."""
    model = job.model
    attention = model.num_layers * model.num_heads * (model.qk_head_dim + model.v_head_dim) * context_tokens
    return 2.0 * active_parameters(job) + attention


def active_parameters(job: Job) -> int:
    """Count the parameters that one token uses: its experts and everything else but the embedding, of which one row."""
    model = job.model
    attention = sum(
        len(rule.layers or ()) * sum(shape[0] * shape[1] for shape in rule.shapes if len(shape) == 2)
        for rule in family_of(job.hf).rules(job.hf)
        if "self_attention" in rule.name
    )
    num_dense_layers = model.num_layers - model.num_moe_layers
    mlp_width = model.ffn_hidden_size * num_dense_layers + model.shared_expert_size * model.num_moe_layers
    router = model.num_moe_layers * model.hidden_size * model.num_experts
    routed = routed_parameters(job, model.experts_per_token)
    return attention + 3 * model.hidden_size * mlp_width + routed + router + model.hidden_size * model.vocab_size


def routed_parameters(job: Job, experts: int) -> int:
    """Count the parameters of so many routed experts in every MoE layer."""
    return job.model.num_moe_layers * experts * 3 * job.model.hidden_size * job.model.moe_ffn_hidden_size


def logprob_use(job: Job, passes: float) -> ResourceUse:
    """Return `passes` forward passes over the samples of a step; a fraction goes over that share of them."""
    return replace(_forward_use(job).scaled(passes), bubble=_bubble(job))


def train_use(job: Job) -> ResourceUse:
    """Return all forward and backward passes of a step; full recomputation does the forward pass twice."""
    training = job.settings.training
    forward, recompute = _forward_use(job).scaled(training.epochs), training.recompute == "full"
    traffic = forward.scaled(2 + recompute)  # a backward pass has twice a forward pass's FLOPs, and as much traffic
    return replace(traffic, flops=forward.flops * (3 + recompute), bubble=_bubble(job))


def optimizer_use(job: Job, stage: int) -> ResourceUse:
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


def _forward_use(job: Job) -> ResourceUse:
    """Return one GPU's part of a forward pass over a step's samples, on the fullest stage."""
    layout, model = job.settings.layout, job.model
    padded_tokens = job.settings.samples_per_step * job.mean_seq_len * job.packing.load_factor
    tokens = padded_tokens / job.dp_size / layout.context
    flops = padded_tokens * forward_flops_per_token(job, job.mean_seq_len) / job.world_size
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


def _bubble(job: Job) -> float:
    """Return the seconds a pipeline waits for each second of work: it fills and drains once in every update."""
    layout = job.settings.layout
    imbalance = max(len(layers) for layers in job.stage_layers) * layout.pipeline / job.model.num_layers
    fill = (layout.pipeline - 1) / (layout.virtual_pipeline or 1) / job.packing.microbatches
    return (1 + fill) * imbalance - 1
