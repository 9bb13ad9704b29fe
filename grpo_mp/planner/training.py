"""Operations and traffic of one GPU while it computes logprobs, trains and updates."""

from dataclasses import replace

from grpo_mp.models.families import family_of
from grpo_mp.planner.bytes_per_parameter import BytesPerParameter
from grpo_mp.planner.job import Job
from grpo_mp.planner.resource_use import Work

SIZE = 2  # bytes of an activation that travels


def token_flops(job: Job, context_tokens: float) -> float:
    """Forward operations of one token: two per parameter it meets, and attention over half of its context."""
    shape = job.shape
    attention = shape.layers * shape.heads * (shape.query_width + shape.value_width) * context_tokens
    return 2.0 * active_parameters(job) + attention


def active_parameters(job: Job) -> int:
    """Of one token: its experts, everything else, and the output layer; of the embedding it reads a single row."""
    shape = job.shape
    sparse = sum(shape.sparse)
    expert = 3 * shape.hidden * shape.expert_width
    attention = _attention_parameters(job)
    dense = 3 * shape.hidden * (shape.dense_width * (shape.layers - sparse) + shape.shared_width * sparse)
    routed = sparse * (expert * shape.experts_per_token + shape.hidden * shape.experts)
    return attention + dense + routed + shape.hidden * shape.vocabulary


def logprob_work(job: Job, passes: float) -> Work:
    """`passes` forward passes over the samples of a step on one GPU; a part of one goes over a share of them."""
    forward = _forward(job).times(passes)
    return replace(forward, idle=_idle(job))


def train_work(job: Job) -> Work:
    """All forward and backward passes of a step; full recomputation does the forward pass twice."""
    optimizer = job.settings.optimizer
    forward, again = _forward(job).times(optimizer.epochs), optimizer.recompute == "full"
    travels = forward.times(2 + again)  # a backward pass computes twice what a forward pass does, and sends as much
    return replace(travels, flops=forward.flops * (3 + again), idle=_idle(job))


def optimizer_work(job: Job, kept: BytesPerParameter, stage: int) -> Work:
    """The updates of a step: gradients summed over replicas, Adam, new weights gathered."""
    count, updates = job.counts[stage], job.settings.optimizer_steps_per_step
    layout = job.settings.layout
    sharded = count.dense / job.dense_shards + count.expert / job.expert_shards
    bytes_ = kept.gradients + kept.weights
    dense = count.dense * bytes_ * (1 - 1 / job.dense_shards)
    expert = count.expert * bytes_ * (1 - 1 / job.expert_shards)
    near = layout.tensor * job.dense_shards <= job.gpus_per_node
    near_expert = layout.expert * layout.expert_tensor * job.expert_shards <= job.gpus_per_node
    adam = sharded * 2 * (kept.optimizer or kept.host_optimizer) + count.total * (kept.gradients + kept.weights)
    one = Work(
        device_bytes=adam if kept.optimizer else 0.0,
        host_copy_bytes=0.0 if kept.optimizer else adam,
        nvlink_bytes=dense * near + expert * near_expert,
        network_bytes=dense * (not near) + expert * (not near_expert),
    )
    return one.times(updates)


def _forward(job: Job) -> Work:
    """One forward pass over a step's samples, as much of it as falls to one GPU, on the fullest stage."""
    layout, shape = job.settings.layout, job.shape
    padded = job.settings.samples_per_step * job.mean_tokens * job.packing.padded
    tokens = padded / job.data_parallel / layout.context
    flops = padded * token_flops(job, job.mean_tokens) / job.world_size
    fullest = max(len(layers) for layers in job.stages)
    sparse = max(sum(shape.sparse[layer] for layer in layers) for layers in job.stages)
    near, far = _tensor_bytes(job, tokens, fullest), 0.0
    ring = tokens * fullest * _key_value_elements(job) * SIZE * (layout.context - 1)
    if layout.tensor * layout.context <= job.gpus_per_node:
        near += ring
    else:
        far += ring
    routed = 2 * sparse * tokens / layout.tensor * shape.experts_per_token * shape.hidden * SIZE * layout.expert_tensor
    group = layout.expert * layout.expert_tensor
    outside = max(0.0, 1 - job.gpus_per_node / group) if group else 0.0
    inside = (1 - 1 / group) - outside if group > 1 else 0.0
    between = tokens / layout.tensor * shape.hidden * SIZE if layout.pipeline > 1 else 0.0
    return Work(
        flops=flops, nvlink_bytes=near + routed * max(inside, 0.0), network_bytes=far + routed * outside + between
    )


def _tensor_bytes(job: Job, tokens: float, layers: int) -> float:
    """Gathers and scatters of sequence parallelism around attention and dense or shared MLPs."""
    tensor = job.settings.layout.tensor
    return 4 * layers * tokens * job.shape.hidden * SIZE * (tensor - 1) / tensor


def _key_value_elements(job: Job) -> float:
    shape, tensor = job.shape, job.settings.layout.tensor
    heads = shape.heads if shape.latent_width else shape.kv_heads
    return heads * (shape.query_width + shape.value_width) / tensor


def _attention_parameters(job: Job) -> int:
    params = family_of(job.hf).rules(job.hf)
    return sum(
        len(rule.layers or ()) * sum(a * b for a, b in (shape for shape in rule.shapes if len(shape) == 2))
        for rule in params
        if "self_attention" in rule.name
    )


def _idle(job: Job) -> float:
    """Seconds a pipeline waits for each second of work: it fills and drains once in every update."""
    layout = job.settings.layout
    fullest = max(len(layers) for layers in job.stages) * layout.pipeline / job.shape.layers
    bubble = (layout.pipeline - 1) / (layout.virtual_pipeline or 1) / job.packing.microbatches
    return (1 + bubble) * fullest - 1
