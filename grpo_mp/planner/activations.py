"""Bytes of activations and logits that a micro-batch takes on a rank.

Elements are counted from a layer's tensors as Megatron makes them. With context and sequence parallelism, attention and
the dense MLP see the tokens of the context shard, norms and routed experts those of the sequence shard. Attention
scores are never kept.

With training.fp8_format TransformerEngine saves inputs of linear layers in FP8 and, of each micro-batch, the weights as
it has quantized them, by rows and by columns (its modules, `linear.py` and `grouped_linear.py`).
"""

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import parameter_table
from grpo_mp.policy.parameter_bytes import DTYPE_BYTES

FP8_BYTES = 1 + 4 / 128  # of an element in blockwise FP8, with its share of a float32 factor


def activation_bytes(job: PlannedJob, stage: int, head: float) -> float:
    """Return the most that one rank of a stage holds while it trains, under training.recompute, above `head` bytes.

    `head`: what the output head needs, whose backward pass is done when that of a layer begins.
    """
    layers = job.stage_layers[stage]
    if job.settings.training.recompute == "full":
        # All that is kept of a layer is its input.
        tokens = job.microbatch_tokens / job.settings.layout.context / job.settings.layout.tensor
        kept = len(layers) * tokens * job.model.hidden_size * DTYPE_BYTES[job.settings.model.dtype]
        working = max((backward_bytes(job, layer) for layer in layers), default=0.0)
    else:
        kept = sum(layer_bytes(job, layer) for layer in layers)
        working = max((backward_bytes(job, layer) - layer_bytes(job, layer) for layer in layers), default=0.0)
    return kept * _microbatches_in_flight(job, stage) + max(0.0, working - head)


def forward_bytes(job: PlannedJob, stage: int) -> float:
    """Return what a forward pass without a backward pass holds: one layer at a time."""
    return max(
        (
            _peak_elements(job, layer) * _element_bytes(job) + quantized_weight_bytes(job, layer, copies=1)
            for layer in job.stage_layers[stage]
        ),
        default=0.0,
    )


def logits_bytes(job: PlannedJob, stage: int, backward: bool) -> float:
    """Return the bytes of the output head, which is on the last stage.

    One chunk of logits with its copies; with `backward` also the gradient of the output layer, which has none where
    adapters alone learn.
    """
    if stage != len(job.stage_layers) - 1:
        return 0.0
    layout, model, dtype_bytes = job.settings.layout, job.model, DTYPE_BYTES[job.settings.model.dtype]
    rows = min(job.settings.training.logprob_chunk_tokens, job.microbatch_tokens)
    columns = -(-model.vocab_size // layout.tensor)
    # Logits and probabilities in float32; backwards also their gradient, and the gradient of the chunk before.
    chunk = rows * columns * (12 + dtype_bytes if backward else 8 + dtype_bytes % 4)
    hidden = job.microbatch_tokens / layout.context * model.hidden_size * dtype_bytes
    weights = 0 if job.settings.model.lora else columns * model.hidden_size * 4
    return chunk + hidden + backward * (hidden + weights + _topk_bytes(job))


def _topk_bytes(job: PlannedJob) -> float:
    """Return the bytes of logprobs of a teacher's top k tokens, and of what the divergence keeps in float64."""
    distillation = job.settings.algorithm.distillation
    topk = distillation.topk or 0 if distillation else 0
    return topk * job.microbatch_tokens / job.settings.layout.context * (4 * 4 + 8 * 8)


def layer_bytes(job: PlannedJob, layer: int) -> float:
    """Return what one layer saves of one micro-batch when nothing is recomputed."""
    routed = _received_copies(job, layer) * (job.model.hidden_size + _expert_elements(job))
    saved = (_dense_elements(job, layer) + routed) * _element_bytes(job)
    if job.settings.training.fp8_format is None:
        return saved
    smaller = 1 - FP8_BYTES / DTYPE_BYTES[job.settings.model.dtype]
    return saved - smaller * _fp8_elements(job, layer) * _element_bytes(job) + quantized_weight_bytes(job, layer)


def quantized_weight_bytes(job: PlannedJob, layer: int, copies: int = 2) -> float:
    """Return the bytes of one layer's weights in FP8; two copies are for a backward pass. 0 without FP8."""
    if job.settings.training.fp8_format is None:
        return 0.0
    layout = job.settings.layout
    table = parameter_table(job.hf, layout.tensor, layout.expert, layout.expert_tensor)
    return copies * FP8_BYTES * table.layers[layer].total


def backward_bytes(job: PlannedJob, layer: int) -> float:
    """Return the most that one layer holds while its backward pass runs: in its routed experts, or outside of them.

    Gradients outside exist when those of the experts are gone, and the other way round.
    """
    outside = _dense_elements(job, layer) * (1 + OVERHEADS.activation_gradients)
    gradients = _received_copies(job, layer) * (2 * job.model.hidden_size + _expert_elements(job))
    inside = layer_bytes(job, layer) / _element_bytes(job) + gradients
    return max(outside, inside, _peak_elements(job, layer)) * _element_bytes(job)


def _peak_elements(job: PlannedJob, layer: int) -> float:
    """Return the elements per token at the peak of a layer's forward pass.

    Of a token that the experts of a rank received: as it came, sorted by expert, what experts compute of it, their
    output and that output in the order of its way back.
    """
    received = _received_copies(job, layer)
    return _dense_elements(job, layer) + received * (4 * job.model.hidden_size + _expert_elements(job))


def _element_bytes(job: PlannedJob) -> float:
    return job.microbatch_tokens / job.settings.layout.context * DTYPE_BYTES[job.settings.model.dtype]


def _received_copies(job: PlannedJob, layer: int) -> float:
    layout = job.settings.layout
    if not job.is_moe_layer(layer):
        return 0.0
    return job.model.experts_per_token * layout.expert_tensor / layout.tensor * OVERHEADS.expert_imbalance


def _expert_elements(job: PlannedJob) -> float:
    """Return the elements inside an expert that a token's copy saves: the first matrix's two outputs, and their
    product, weighted by the router."""
    return 3 * job.model.moe_ffn_hidden_size / job.settings.layout.expert_tensor


def _fp8_elements(job: PlannedJob, layer: int) -> float:
    """Return the elements per token that a layer saves in FP8: inputs of its experts' or its MLP's two matrices.

    Those of attention are kept in model.dtype, too, by norm and attention.
    """
    model, layout = job.model, job.settings.layout
    if not job.is_moe_layer(layer):
        return (model.hidden_size + model.ffn_hidden_size) / layout.tensor
    shared = model.shared_expert_size / layout.tensor
    return shared + _received_copies(job, layer) * (model.hidden_size + _expert_elements(job) / 3)


def _dense_elements(job: PlannedJob, layer: int) -> float:
    model, layout = job.model, job.settings.layout
    gathered = model.hidden_size if layout.tensor > 1 else 0
    per_token = 4 * model.hidden_size / layout.tensor + gathered + _attention_elements(job)  # norms first
    if not job.is_moe_layer(layer):
        return per_token + gathered + 3 * model.ffn_hidden_size / layout.tensor
    shared = gathered + 3 * model.shared_expert_size / layout.tensor if model.shared_expert_size else 0
    return per_token + shared + 3 * model.num_experts * 2 / layout.tensor  # the router computes in float32


def _attention_elements(job: PlannedJob) -> float:
    """Return the elements per token: projections, what the rotary embedding makes of them, and the heads' output.

    With latent attention the fused rotary embedding changes queries in place and builds keys and values from a
    projection that is not kept. Where prompts are shared, each response's attention has a copy of its prompt's keys
    and values.
    """
    model, tensor, expanded = job.model, job.settings.layout.tensor, job.expanded_keys
    if model.mla_cache_dim:
        per_head = 2 * model.qk_head_dim + 2 * model.v_head_dim + expanded * (model.qk_head_dim + model.v_head_dim)
        return model.num_heads / tensor * per_head + 2 * model.mla_cache_dim
    heads = 2 * (model.num_heads + 2 * model.num_kv_heads) + model.num_heads + expanded * 2 * model.num_kv_heads
    return heads * model.qk_head_dim / tensor


def _microbatches_in_flight(job: PlannedJob, stage: int) -> float:
    layout = job.settings.layout
    stages_left, virtual = layout.pipeline - stage, layout.virtual_pipeline
    if virtual:
        in_flight = (2 * (stages_left - 1) + (virtual - 1) * layout.pipeline + 1) / virtual
        return min(in_flight, job.packing.microbatches)
    return min(stages_left, job.packing.microbatches)
