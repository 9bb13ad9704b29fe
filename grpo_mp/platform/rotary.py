"""Rotary position embedding on a CPU: each half of a head is written in place, without concatenation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Halves = tuple[Tensor, Tensor]


def _halves(x: Tensor, rotary_dim: int, interleaved: bool) -> Halves:
    if interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]


def _rotate(source: Halves, target: Halves, cos: Tensor, sin: Tensor) -> None:
    # (a cos - b sin, b cos + a sin) of source (a, b): RoFormer, arXiv 2104.09864, eq. 34
    torch.mul(source[0], cos, out=target[0]).addcmul_(source[1], sin, value=-1)
    torch.mul(source[1], cos, out=target[1]).addcmul_(source[0], sin)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rotary_dim, ctx.interleaved = 2 * cos.shape[-1], interleaved
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _rotate(_halves(x, ctx.rotary_dim, interleaved), _halves(out, ctx.rotary_dim, False), cos, sin)
        out[..., ctx.rotary_dim :] = x[..., ctx.rotary_dim :]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        cos, sin = ctx.saved_tensors
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _rotate(_halves(grad, ctx.rotary_dim, False), _halves(out, ctx.rotary_dim, ctx.interleaved), cos, -sin)
        out[..., ctx.rotary_dim :] = grad[..., ctx.rotary_dim :]
        return out, None, None, None


def apply_rotary(
    original: Callable[..., Tensor],
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    mla_rotary_interleaved: bool = False,
) -> Tensor:
    """Replace `_apply_rotary_pos_emb_bshd`: t [s, b, h, d], freqs [s, b or 1, 1, r <= d] -> [s, b, h, d].

    The two halves of `freqs` are equal, except for interleaved embeddings: those are left to `original`. Latent
    attention stores the elements of a pair as neighbors, and gets them back as halves: Megatron-Core says so by
    `multi_latent_attention`, from 0.19 on by `mla_rotary_interleaved`.
    """
    latent = multi_latent_attention or mla_rotary_interleaved
    if rotary_interleaved:
        return original(t, freqs, rotary_interleaved, latent, mscale)
    angles = freqs[..., : freqs.shape[-1] // 2]
    cos, sin = ((values * mscale).to(t.dtype) for values in (angles.cos(), angles.sin()))
    rotated: Tensor = _Rotary.apply(t, cos, sin, latent)
    return rotated
