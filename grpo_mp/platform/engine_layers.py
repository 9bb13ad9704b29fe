"""Layers of a CPU engine with few torch operations.

In a decode step of a small model the overhead per torch operation dominates. SGLang's native code uses about ten
operations where torch has a single one. Each function calls SGLang's `original` in the cases that it does not support.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Original = Callable[..., Any]
SHARED_HIDDEN_SIZE = 512  # below it, a call of oneDNN costs more than it saves
ALIGNMENT_BYTES = 16  # torch's grouped_mm requires rows aligned to this


def share_products_among_threads() -> torch.library.Library:
    """Use oneDNN for matrix products in this process while the returned library exists.

    MKL divides the rows among threads. A decode step has one row for each request, too few for several threads.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", matrix_product, "CPU")
    return library


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    """Return [M, K] @ [K, N]."""
    weight = b.t()
    if a.dtype == b.dtype == torch.float32 and weight.is_contiguous() and a.numel():
        result: Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
        return result
    return torch.mm(a, b, out=a.new_empty(len(a), b.shape[1]))


def rms_norm_forward(
    original: Original, norm: Any, x: Tensor, residual: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Replace `RMSNorm.forward_native`: normalize x [..., H].

    With `residual`, return the pair (norm of x + residual, x + residual).
    """
    weight = norm.weight
    standard = norm.variance_size_override is None and norm.override_orig_dtype is None
    if args or kwargs or not standard or not (x.dtype == weight.dtype == torch.float32) or x.shape[-1] != len(weight):
        return original(norm, x, residual, *args, **kwargs)
    if residual is None:
        return F.rms_norm(x, weight.shape, weight, norm.variance_epsilon)
    x = x + residual
    return F.rms_norm(x, weight.shape, weight, norm.variance_epsilon), x


def norms_over_heads(original: Original, norms: Any, *states: Tensor) -> tuple[Tensor, ...]:
    """Replace `MiniMaxM2QKRMSNorm.forward`, which needs Triton: normalize queries and keys, [T, heads * head_size]."""
    from sglang.srt.layers.dp_attention import attn_tp_all_reduce

    squares = torch.stack([x.float().square().mean(-1, keepdim=True) for x in states])
    if norms._world_size > 1:
        squares = attn_tp_all_reduce(squares) / norms._world_size
    scales = torch.rsqrt(squares + norms._eps)
    weights = (norms._q_norm.weight, norms._k_norm.weight)
    return tuple((x.float() * scale * w).to(x.dtype) for x, scale, w in zip(states, scales, weights, strict=True))


def routed_experts(original: Original, layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
    """Replace `moe_forward_native`: return the weighted sum [T, H] of the experts' outputs for x [T, H].

    `topk_output`: weights [T, K] and ids [T, K] of each token's experts, -1 for experts on other ranks; `layer`: has
    the weights [E, 2 I, H] and [E, H, I] of E local experts.
    """
    up = layer.w13_weight
    down = layer.w2_weight
    if not _supports(layer, config, x):
        result: Tensor = original(layer, x, topk_output, config)
        return result
    weights, ids, _ = topk_output
    tokens, topk = ids.shape
    experts = ids.flatten()
    order = experts.argsort()
    if layer.moe_ep_size > 1:  # leave out the experts of other ranks, which sort first
        order = order[int((experts < 0).sum()) :]
        if not len(order):
            return torch.zeros_like(x)
    offsets = torch.bincount(experts[order], minlength=len(up)).cumsum(0, dtype=torch.int32)
    gate, linear = F.grouped_mm(x[order // topk], up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    sorted_output = F.grouped_mm(F.silu(gate) * linear, down.transpose(1, 2), offs=offsets)
    output = x.new_zeros(tokens * topk, x.shape[1]).index_copy_(0, order, sorted_output).view(tokens, topk, -1)
    return (weights[:, None].to(output.dtype) @ output)[:, 0]


def _supports(layer: Any, config: Any, x: Tensor) -> bool:
    standard = config.activation == "silu" and config.gemm1_alpha is None and not config.apply_router_weight_on_input
    biased = getattr(layer, "w13_weight_bias", None) is not None or getattr(layer, "w2_weight_bias", None) is not None
    weights = (layer.w13_weight, layer.w2_weight)
    aligned = all(weight.shape[2] * weight.element_size() % ALIGNMENT_BYTES == 0 for weight in weights)
    return (
        standard and not biased and aligned and len(x) > 0 and all(w.dtype == x.dtype == torch.float32 for w in weights)
    )


def rotary(
    original: Original, embedding: Any, positions: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Replace `RotaryEmbedding.forward_native`: return query and key [T, heads * head_size] rotated by `positions`."""
    cache = embedding.cos_sin_cache
    full_head = embedding.rotary_dim == embedding.head_size and not hasattr(embedding, "sin_cos_cache")
    if any(argument is not None for argument in (*args, *kwargs.values())) or not (
        full_head and embedding.is_neox_style and query.dtype == cache.dtype and positions.ndim == 1
    ):
        result: tuple[Tensor, Tensor] = original(embedding, positions, query, key, *args, **kwargs)
        return result
    size = embedding.head_size
    tokens = len(positions)
    heads = torch.cat((query.view(tokens, -1, size), key.view(tokens, -1, size)), 1)
    cos, sin = cache.index_select(0, positions)[:, None].chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    query_heads = query.numel() // (tokens * size)
    return rotated[:, :query_heads].reshape(query.shape), rotated[:, query_heads:].reshape(key.shape)
