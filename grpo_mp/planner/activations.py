"""Bytes of activations and logits per micro-batch on a rank.

Counted from the tensors that Megatron's layers allocate. With context and sequence parallelism, attention and the
dense MLP hold the tokens of the context shard; norms and routed experts hold those of the sequence shard. Attention
scores are never stored.

With training.fp8_format, Transformer Engine also saves the quantized weights of each layer in two copies, row-wise and
column-wise (modules `linear.py` and `grouped_linear.py`). That it saves some inputs in FP8 is not counted.
"""

from typing import NamedTuple

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import PlannedJob
from grpo_mp.policy.parameter_bytes import DTYPE_BYTES
from grpo_mp.rollout.routed_experts import KEY_BYTES

FP8_BYTES = 1 + 4 / 128  # per element of blockwise FP8: the value and 1/128 of a float32 scale


class LayerBytes(NamedTuple):
    """Bytes of one layer and micro-batch: saved for the backward pass, and at the peak of each pass."""

    saved: float
    forward: float
    backward: float


def activation_bytes(job: PlannedJob, stage: int, head: float) -> float:
    """Return the peak activation memory of a rank of `stage` in training, under training.recompute.

    `head`: bytes of the output head. They are free again when a layer's backward pass begins, so the layer's working
    memory counts only where it exceeds them.
    """
    layers = [layer_bytes(job, layer) for layer in job.stage_layers[stage]]
    if job.settings.training.recompute == "full":
        # Full recomputation stores only the layer's input.
        kept = len(layers) * job.model.hidden_size / job.settings.layout.tensor * _element_bytes(job)
        working = max((layer.backward for layer in layers), default=0.0)
    else:
        kept = sum(layer.saved for layer in layers) + len(layers) * _quantized_weight_bytes(job, stage)
        working = max((layer.backward - layer.saved for layer in layers), default=0.0)
    kept += _stored_key_bytes(job, stage)
    return kept * _microbatches_in_flight(job, stage) + max(0.0, working - head)


def forward_bytes(job: PlannedJob, stage: int) -> float:
    """Return the peak activation memory of a forward pass without gradients: that of the largest layer."""
    peaks = (layer_bytes(job, layer).forward for layer in job.stage_layers[stage])
    return max(peaks, default=0.0) + _quantized_weight_bytes(job, stage, copies=1) + _stored_key_bytes(job, stage)


def _stored_key_bytes(job: PlannedJob, stage: int) -> float:
    """Return the bytes of the keys that a stage's indexers chose in a micro-batch, and of the keys replayed there.

    Megatron's DSAttention stores them with the micro-batch until its backward pass, whatever is recomputed.
    """
    indexer = job.model.indexer
    if indexer is None or not job.stores_keys:
        return 0.0
    tokens = job.microbatch_tokens / job.settings.layout.context
    bytes_per_key = _key_id_bytes(job) + KEY_BYTES * (job.replayed_indexer is not None)
    return tokens * len(indexer.layers.intersection(job.stage_layers[stage])) * indexer.topk * bytes_per_key


def _key_id_bytes(job: PlannedJob) -> int:
    """Return the bytes of the position of a chosen key: Megatron's kernels return int32, and torch.topk int64."""
    return 8 if job.settings.training.megatron_args.get("dsa_kernel_backend") == "none" else 4


def logits_bytes(job: PlannedJob, stage: int, backward: bool) -> float:
    """Return the bytes of the output head; 0 on all stages but the last.

    The head holds one chunk of logits with its copies. `backward`: also count the gradient of the output layer, unless
    LoRA freezes it.
    """
    if stage != len(job.stage_layers) - 1:
        return 0.0
    layout = job.settings.layout
    model = job.model
    dtype_bytes = DTYPE_BYTES[job.settings.model.dtype]
    rows = min(job.settings.training.logprob_chunk_tokens, job.microbatch_tokens)
    columns = -(-model.vocab_size // layout.tensor)
    # Logits and probabilities in float32; in backward also their gradient and that of the preceding chunk.
    chunk = rows * columns * (12 + dtype_bytes if backward else 8 + dtype_bytes % 4)
    hidden = job.microbatch_tokens / layout.context * model.hidden_size * dtype_bytes
    weights = 0 if job.settings.model.lora else columns * model.hidden_size * 4
    return chunk + hidden + backward * (hidden + weights)


def _quantized_weight_bytes(job: PlannedJob, stage: int, copies: int = 2) -> float:
    """Return the bytes of one layer's weights in FP8; 0 without training.fp8_format.

    `copies`: 2 where a backward pass follows (row-wise and column-wise), else 1.
    """
    if job.settings.training.fp8_format is None:
        return 0.0
    return copies * FP8_BYTES * job.parameter_counts[stage].total / max(1, len(job.stage_layers[stage]))


def layer_bytes(job: PlannedJob, layer: int) -> LayerBytes:
    """Return the bytes of one layer and micro-batch, without recomputation.

    Each token copy that reaches a rank's experts is held four times in the forward pass besides the experts' gate and
    up outputs and their weighted product: as received, sorted by expert, as expert output, and unsorted for the
    combine. Gradients of the experts and gradients of the rest never exist at the same time.
    """
    model = job.model
    layout = job.settings.layout
    gathered = model.hidden_size if layout.tensor > 1 else 0
    # The first term: four tensors of the sequence shard around the two norms.
    dense = 4 * model.hidden_size / layout.tensor + gathered + _attention_elements(job, layer)
    received = expert = 0.0
    if job.is_moe_layer(layer):
        received = model.experts_per_token * layout.expert_tensor / layout.tensor * OVERHEADS.expert_imbalance
        expert = 3 * model.moe_ffn_hidden_size / layout.expert_tensor
        dense += gathered + 3 * model.shared_expert_size / layout.tensor if model.shared_expert_size else 0
        dense += 3 * model.num_experts * 2 / layout.tensor  # 2: float32 router logits
    else:
        dense += gathered + 3 * model.ffn_hidden_size / layout.tensor

    saved = dense + received * (model.hidden_size + expert)
    forward = dense + received * (4 * model.hidden_size + expert)
    backward = saved + received * (2 * model.hidden_size + expert)
    backward = max(dense * (1 + OVERHEADS.activation_gradients), backward, forward)
    return LayerBytes(*(elements * _element_bytes(job) for elements in (saved, forward, backward)))


def _element_bytes(job: PlannedJob) -> float:
    return job.microbatch_tokens / job.settings.layout.context * DTYPE_BYTES[job.settings.model.dtype]


def _attention_elements(job: PlannedJob, layer: int) -> float:
    """Return the elements per token that attention saves: projections, their rotary embeddings, and the heads' output.

    With latent attention the fused rotary kernel changes queries in place, and the projection from which it builds keys
    and values is freed. Copies of a shared prompt's keys are not counted.
    """
    model = job.model
    tensor = job.settings.layout.tensor
    linear = job.model.linear
    if linear and layer in linear.layers:
        values = linear.value_heads * linear.value_dim
        # Projections, convolution, normed queries and keys of each value head, output before and after its gate.
        return (2 * linear.channels + 2 * linear.value_heads * linear.key_dim + 4 * values) / tensor
    if model.indexer:
        # Of each head: query, absorbed query, output as latent and as value; the latents; positions of keys.
        heads = model.num_heads / tensor * (model.qk_head_dim + 2 * model.mla_cache_dim + model.v_head_dim)
        keys = 0 if job.stores_keys else model.indexer.topk * _key_id_bytes(job)
        return heads + 2 * model.mla_cache_dim + keys / DTYPE_BYTES[job.settings.model.dtype]
    if model.mla_cache_dim:
        return model.num_heads / tensor * 2 * (model.qk_head_dim + model.v_head_dim) + 2 * model.mla_cache_dim
    heads = 2 * (model.num_heads + 2 * model.num_kv_heads) + model.num_heads
    return heads * model.qk_head_dim / tensor


def _microbatches_in_flight(job: PlannedJob, stage: int) -> float:
    """Return the micro-batches whose activations a stage holds at once under Megatron's (interleaved) 1F1B schedule."""
    layout = job.settings.layout
    stages_left = layout.pipeline - stage
    virtual = layout.virtual_pipeline
    if virtual:
        in_flight = (2 * (stages_left - 1) + (virtual - 1) * layout.pipeline + 1) / virtual
        return min(in_flight, job.packing.microbatches)
    return min(stages_left, job.packing.microbatches)
