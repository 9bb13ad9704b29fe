"""Arithmetic of a model: FLOPs of a token, and the parameters that a token uses."""

from dataclasses import replace

from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig


def forward_flops_per_token(model: ModelShape, hf: HfConfig, context_tokens: float) -> float:
    """Return two FLOPs per active parameter, and attention over half of the context.

    `context_tokens`: length of the token's sequence, averaged over tokens: long sequences have more of them.
    """
    attention = model.num_layers * model.num_heads * (model.qk_head_dim + model.v_head_dim) * context_tokens
    return 2.0 * active_parameters(model, hf) + attention


def mtp_flops_per_token(model: ModelShape, hf: HfConfig, context_tokens: float) -> float:
    """Return those of a multi-token-prediction layer in training: a mean layer, its projection, the head."""
    if not hf.trains_mtp:
        return 0.0
    head = 2.0 * model.hidden_size * model.vocab_size
    layers = forward_flops_per_token(model, hf, context_tokens) - head
    return layers / model.num_layers + 4.0 * model.hidden_size**2 + head


def fp8_flops_per_token(model: ModelShape, hf: HfConfig) -> float:
    """Return those of a forward pass that training.fp8_format computes in FP8: all but attention, head and routers."""
    router = model.num_moe_layers * model.hidden_size * model.num_experts
    return 2.0 * (active_parameters(model, hf) - model.hidden_size * model.vocab_size - router)


def active_parameters(model: ModelShape, hf: HfConfig) -> int:
    """Count the parameters that one token uses: its experts and everything else but the embedding, of which one row."""
    attention = sum(
        len(rule.layers or ()) * sum(shape[0] * shape[1] for shape in rule.shapes if len(shape) == 2)
        for rule in family_of(hf).rules(replace(hf, trains_mtp=False))
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
