"""Gated delta net of a CPU engine (Qwen3-Next, Qwen3.5), in place of the kernels that SGLang's Intel wheel has.

Shapes: T tokens of B requests, HK key heads of size K, HV value heads of size V, convolution window W. The state pools
hold a state [HV, V, K] and the last W - 1 inputs [D, W - 1] of the convolution per slot; all functions update them.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_mp.platform.delta_rule import unit_heads


def install() -> None:
    """Make SGLang's models find the functions of this module as kernels of `sgl_kernel`."""
    mamba = import_module("sgl_kernel.mamba")
    for function in MAMBA:
        setattr(mamba, function.__name__, function)
    for function in OPERATORS:
        setattr(torch.ops.sgl_kernel, function.__name__, function)


def causal_conv1d_fn_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, conv_states: Tensor, query_start_loc: Tensor, **requests: Any
) -> Tensor:
    """Convolve the new inputs x [D, T] of all requests with weight [D, W]; return SiLU of it, [D, T]."""
    output = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    window = weight.shape[1] - 1
    for request, slot in enumerate(requests["cache_indices"].tolist()):
        start = bounds[request]
        stop = bounds[request + 1]
        continues = requests["has_initial_state"][request]
        before = conv_states[slot] if continues else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([before.to(x.dtype), x[:, start:stop]], 1)
        output[:, start:stop] = _convolve(inputs, weight, bias)
        conv_states[slot] = inputs[:, -window:]
    return output


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve one new input x [B, D] of each request; return SiLU of it, [B, D]."""
    inputs = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[:, :, None]], 2)
    conv_states[conv_state_indices] = inputs[:, :, 1:].to(conv_states.dtype)
    return _convolve(inputs, weight, bias)[..., 0]


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return SiLU [..., D, L] of the convolution of inputs [..., D, L + W - 1] with weight [D, W].

    All steps are of single elements, so that an output does not depend on L.
    """
    window = weight.shape[1]
    length = inputs.shape[-1] - window + 1
    output = inputs[..., :length] * weight[:, :1]
    for i in range(1, window):
        output = output + inputs[..., i : i + length] * weight[:, i : i + 1]
    return F.silu(output if bias is None else output + bias[:, None])


def fused_gdn_gating_cpu(decay: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay and the write strength of each token's value heads, [1, T, HV] each, in float32.

    `decay`: A_log [HV]; `a`, `b`: projections [T, HV]; `bias`: dt_bias [HV].
    """
    log_decay = -decay.float().exp() * F.softplus(a.float() + bias.float())
    return log_decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **requests: Any
) -> tuple[Tensor, None, None]:
    """Return the outputs [1, T, HV, V] of the requests' new tokens. q, k [1, T, HK, K], v [1, T, HV, V].

    The requests advance together, a token at a time, as when they generate: no output depends on the other requests.
    """
    bounds = requests["cu_seqlens"]
    lengths, order = bounds.diff().sort(descending=True)
    starts = bounds[:-1][order]
    slots = requests["initial_state_indices"][order]
    counts = [int((lengths > position).sum()) for position in range(int(lengths[0]))]
    tokens = torch.cat([starts[:count] + position for position, count in enumerate(counts)])
    heads = (unit_heads(x[0].float(), v.shape[2]) for x in (q, k))
    steps = zip(*(x[tokens].split(counts) for x in (*heads, v[0], g[0], beta[0])), strict=True)
    states = requests["initial_state"][slots]
    outputs = [_advance(states[:count], *step) for count, step in zip(counts, steps, strict=True)]
    requests["initial_state"][slots] = states
    output = torch.empty_like(v)
    output[0, tokens] = torch.cat(outputs).to(v.dtype)
    return output, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(*, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
    """Return the outputs [1, B, HV, V] of one new token of each request. q, k [1, B, HK, K], v [1, B, HV, V]."""
    log_decay, strength = fused_gdn_gating_cpu(*(others[name] for name in ("A_log", "a", "b", "dt_bias")))
    query, key = (unit_heads(x[0].float(), v.shape[2]) for x in (q, k))
    states = others["initial_state_source"]
    slots = others["initial_state_indices"]
    state = states[slots]
    output = _advance(state, query, key, value=v[0], log_decay=log_decay[0], strength=strength[0])
    states[slots] = state
    return output[None].to(v.dtype)


def _advance(state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """Apply the gated delta rule (arXiv 2412.06464, eq. 10) for one token to states [B, HV, V, K], in place.

    Returns [B, HV, V]. `query`, `key`: [B, HV, K]; `value`: [B, HV, V]; `log_decay`, `strength`: [B, HV].
    """
    state.mul_(log_decay.exp()[..., None, None])
    error = (value.float() - (state @ key[..., None])[..., 0]) * strength[..., None]
    state.add_(error[..., None] * key[..., None, :])
    return (state @ query[..., None])[..., 0] * query.shape[-1] ** -0.5


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Return the normed heads of queries and keys [T, heads * head_dim]; the weights are centred on zero."""
    return _zero_centred_norm(q, q_weight, eps, head_dim), _zero_centred_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate: Tensor, k: Tensor, *norms: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Split [T, heads * 2 * head_dim] into queries and gates; return normed queries, normed keys, and gates."""
    *_, head_dim, heads = norms
    query, gate = q_gate.unflatten(-1, (heads, 2, head_dim)).unbind(2)
    return (*fused_qk_gemma_rmsnorm_cpu(query.flatten(1), k, *norms[:-1]), gate.flatten(1))


def _zero_centred_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    heads = x.unflatten(-1, (-1, head_dim)).float()
    return (F.rms_norm(heads, (head_dim,), eps=eps) * (1 + weight.float())).to(x.dtype).reshape(-1, head_dim)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply x by the sigmoid of `gate`, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the input projections of Qwen3.5 into qkv [T, D], gates z [T, HV, V], b [T, HV] and a [T, HV]."""
    keys = key_heads * key_dim
    values = value_heads * value_dim
    qkv, z = qkvz.split([2 * keys + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.unflatten(-1, (value_heads, value_dim)), b.contiguous(), a.contiguous()


def gated_norm_forward(original: Any, norm: Any, x: Tensor, gate: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replace the forward pass of SGLang's gated norms: RMSNorm of x [rows, V], times the SiLU of `gate` [rows, V]."""
    normed = F.rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps)
    return (normed * F.silu(gate.reshape(x.shape).float())).to(x.dtype)


def gate_shared_expert(
    original: Any, hidden: Tensor, gate_weight: Tensor, shared: Tensor, output: Tensor, *, do_add: bool
) -> None:
    """Write `shared` [T, H], times the sigmoid of each token's gate, into `output`, or add it with `do_add`."""
    gated = shared * (hidden * gate_weight).sum(-1, keepdim=True).sigmoid()  # a matrix product depends on the batch
    output.copy_(output + gated if do_add else gated)


# SGLang imports the first from `sgl_kernel.mamba`, and the others from `torch.ops.sgl_kernel`.
MAMBA: tuple[Callable[..., Any], ...] = (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)
OPERATORS: tuple[Callable[..., Any], ...] = (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_sigmoid_mul_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
)
