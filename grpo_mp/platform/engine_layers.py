"""Layers of a CPU engine in few operations.

A decode step of a small model computes on a handful of tokens: each torch operation costs microseconds before it
computes anything, and SGLang's plain torch code takes some ten of them where torch has one. Each function here is
called with SGLang's own as `original` and leaves to it what it was not made for.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Original = Callable[..., Any]
ALIGNMENT_BYTES = 16  # torch's grouped product wants rows that begin at a multiple of it


def rms_norm(
    original: Original, norm: Any, x: Tensor, residual: Tensor | None = None, *more: Any, **options: Any
) -> Any:
    """`RMSNorm.forward_native`: x [..., H] -> the same shape, or a pair with the sum of x and `residual`."""
    weight = norm.weight
    plain = norm.variance_size_override is None and norm.override_orig_dtype is None
    if more or options or not plain or not (x.dtype == weight.dtype == torch.float32) or x.shape[-1] != len(weight):
        return original(norm, x, residual, *more, **options)
    if residual is None:
        return F.rms_norm(x, weight.shape, weight, norm.variance_epsilon)
    x = x + residual
    return F.rms_norm(x, weight.shape, weight, norm.variance_epsilon), x


def routed_experts(original: Original, layer: Any, x: Tensor, chosen: Any, config: Any) -> Tensor:
    """`moe_forward_native`: x [T, H] through the experts that `chosen` names for each token -> [T, H].

    `chosen` holds weights [T, K] and expert ids [T, K]; `layer` [E, 2 I, H] and [E, H, I].
    """
    up, down = layer.w13_weight, layer.w2_weight
    if not _takes(layer, config, x):
        found: Tensor = original(layer, x, chosen, config)
        return found
    weights, ids, _ = chosen
    tokens, choices = ids.shape
    by_expert = ids.flatten()
    order = by_expert.argsort()
    ends = torch.bincount(by_expert, minlength=len(up)).cumsum(0, dtype=torch.int32)
    gate, linear = F.grouped_mm(x[order // choices], up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    mixed = F.grouped_mm(F.silu(gate) * linear, down.transpose(1, 2), offs=ends)
    output = torch.empty_like(mixed).index_copy_(0, order, mixed).view(tokens, choices, -1)
    return (weights[:, None].to(output.dtype) @ output)[:, 0]


def _takes(layer: Any, config: Any, x: Tensor) -> bool:
    plain = config.activation == "silu" and config.gemm1_alpha is None and not config.apply_router_weight_on_input
    biased = getattr(layer, "w13_weight_bias", None) is not None or getattr(layer, "w2_weight_bias", None) is not None
    weights = (layer.w13_weight, layer.w2_weight)
    aligned = all(weight.shape[2] * weight.element_size() % ALIGNMENT_BYTES == 0 for weight in weights)
    return plain and not biased and aligned and len(x) > 0 and all(w.dtype == x.dtype == torch.float32 for w in weights)


def rotary(
    original: Original, embedding: Any, positions: Tensor, query: Tensor, key: Tensor, *more: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """`RotaryEmbedding.forward_native`: query and key [T, ...], whose last axis holds whole heads, turned."""
    table = embedding.cos_sin_cache
    whole = embedding.rotary_dim == embedding.head_size and not hasattr(embedding, "sin_cos_cache")
    if any(given is not None for given in (*more, *options.values())) or not (
        whole and embedding.is_neox_style and query.dtype == table.dtype and positions.ndim == 1
    ):
        both: tuple[Tensor, Tensor] = original(embedding, positions, query, key, *more, **options)
        return both
    size, tokens = embedding.head_size, len(positions)
    heads = torch.cat((query.view(tokens, -1, size), key.view(tokens, -1, size)), 1)
    cos, sin = table.index_select(0, positions)[:, None].chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    queries = query.numel() // (tokens * size)
    return turned[:, :queries].reshape(query.shape), turned[:, queries:].reshape(key.shape)
