"""What a micro-batch leaves on a rank for its backward pass, and what the output head needs.

Elements are counted from the layers' tensors as Megatron makes them: attention and dense MLP see the tokens of the
context shard, norms and routed experts those of the sequence shard; attention scores are never kept.
"""

from grpo_mp.planner.bytes_per_parameter import BYTES
from grpo_mp.planner.job import Job
from grpo_mp.planner.overheads import OVERHEADS


def activation_bytes(job: Job, stage: int) -> float:
    """Most that one rank of a stage holds while it trains, under optimizer.recompute."""
    layers = job.stages[stage]
    saved = {layer: layer_bytes(job, layer) for layer in layers}
    working = max(saved.values(), default=0.0)
    if job.settings.optimizer.recompute == "full":
        kept = len(layers) * _entry_bytes(job)
        working *= 1 + OVERHEADS.gradients_of_activations
    else:
        kept = sum(saved.values())
        working *= OVERHEADS.gradients_of_activations
    return kept * _in_flight(job, stage) + working


def forward_bytes(job: Job, stage: int) -> float:
    """The same without a backward pass: one layer at a time."""
    return max((layer_bytes(job, layer) for layer in job.stages[stage]), default=0.0)


def logits_bytes(job: Job, stage: int, backward: bool) -> float:
    """On the last stage: logits of one chunk with their copies, and in a backward pass the output layer's gradient."""
    if stage != len(job.stages) - 1:
        return 0.0
    layout, shape, size = job.settings.layout, job.shape, BYTES[job.settings.model.dtype]
    rows = min(job.settings.optimizer.logprob_chunk_tokens, job.microbatch_tokens)
    columns = -(-shape.vocabulary // layout.tensor)
    # Logits and probabilities in float32; backwards the slope as well, and the gradient of the chunk before.
    chunk = rows * columns * (12 + size if backward else 8 + size % 4)
    hidden = job.microbatch_tokens / layout.context * shape.hidden * size
    return chunk + hidden + backward * (hidden + columns * shape.hidden * 4)


def layer_bytes(job: Job, layer: int) -> float:
    """Saved by one layer for one micro-batch when nothing is recomputed."""
    return _tensor_elements(job, layer) * BYTES[job.settings.model.dtype]


def _entry_bytes(job: Job) -> float:
    """The input of a layer: all that full recomputation keeps."""
    layout = job.settings.layout
    tokens = job.microbatch_tokens / layout.context / layout.tensor
    return tokens * job.shape.hidden * BYTES[job.settings.model.dtype]


def _tensor_elements(job: Job, layer: int) -> float:
    shape, layout = job.shape, job.settings.layout
    tokens = job.microbatch_tokens / layout.context
    gathered = shape.hidden if layout.tensor > 1 else 0
    norms = 4 * shape.hidden / layout.tensor
    per_token = norms + gathered + _attention(job)
    if not shape.sparse[layer]:
        return tokens * (per_token + gathered + 3 * shape.dense_width / layout.tensor)
    shared = gathered + 3 * shape.shared_width / layout.tensor if shape.shared_width else 0
    router = 3 * shape.experts * 2 / layout.tensor  # in float32
    received = shape.experts_per_token * layout.expert_tensor / layout.tensor * OVERHEADS.imbalance
    routed = received * (4 * shape.hidden + 3 * shape.expert_width / layout.expert_tensor)
    return tokens * (per_token + shared + router + routed)


def _attention(job: Job) -> float:
    """Per token: projections, what the rotary embedding makes of them, and the heads' output."""
    shape, tensor = job.shape, job.settings.layout.tensor
    if shape.latent_width:
        heads = 2 * shape.query_width + (shape.query_width + 2 * shape.value_width) + shape.query_width
        return shape.heads / tensor * (heads + shape.value_width) + 2 * shape.latent_width
    return (2 * (shape.heads + 2 * shape.kv_heads) + shape.heads) * shape.query_width / tensor


def _in_flight(job: Job, stage: int) -> float:
    """Micro-batches whose activations wait on a stage: one forward, one backward; more when interleaved."""
    layout = job.settings.layout
    behind, virtual = layout.pipeline - stage, layout.virtual_pipeline
    if virtual:
        return min((2 * (behind - 1) + (virtual - 1) * layout.pipeline + 1) / virtual, job.packing.microbatches)
    return min(behind, job.packing.microbatches)
