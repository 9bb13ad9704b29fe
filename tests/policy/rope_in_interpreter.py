"""Compare Megatron's fused rotary embedding of latent attention with its plain one, in Triton's interpreter.

Packed sequences, context ranks, values and gradients, in float32.
test_megatron_config runs this file in a process of its own, because Triton reads TRITON_INTERPRET=1 on import.
"""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from torch import Tensor

from grpo_mp.policy.shared_prompt_attention import packed_sequences

LENGTHS = (8, 12, 4)  # multiples of twice the context ranks; the last stands for padding
HEADS = 4
NOPE = 16
ROPE = 8
VALUE = 4
CONFIG = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=True)
# Version 0.16 reads the config instead.
INTERLEAVED = {"mla_rotary_interleaved": True} if "mla_rot" in str(signature(apply_rotary_pos_emb)) else {}


def plain(q: Tensor, kv: Tensor, k_rope: Tensor, angles: Tensor, scale: float, ends: Tensor, group) -> list[Tensor]:
    def rotate(x: Tensor) -> Tensor:
        options = {"cu_seqlens": ends, "mscale": scale, "cp_group": group} | INTERLEAVED
        return apply_rotary_pos_emb(x, angles, config=CONFIG, **options)

    key, value = kv.split([NOPE, VALUE], -1)
    rotated = rotate(k_rope).expand(-1, HEADS, -1)
    return [torch.cat([q[..., :NOPE], rotate(q[..., NOPE:])], -1), torch.cat([key, rotated], -1), value]


def fused_outputs(
    q: Tensor, kv: Tensor, k_rope: Tensor, angles: Tensor, scale: float, ends: Tensor, group
) -> list[Tensor]:
    tables = [(angles.cos() * scale).contiguous(), (angles.sin() * scale).contiguous()]
    ranks = (ends, group.rank(), group.size())
    query = fused.fused_apply_mla_rope_for_q(q.clone(), *tables, NOPE, ROPE, *ranks)
    return [query, *fused.fused_apply_mla_rope_for_kv(kv, k_rope, *tables, ROPE, NOPE, VALUE, *ranks)]


@pytest.mark.parametrize(("context", "rank", "scale"), [(1, 0, 1.3), (2, 0, 1.0), (2, 1, 1.0)])
def test_fused_equals_plain(context: int, rank: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("fwd_q", "bwd_q", "fwd_kv", "bwd_kv"):
        tuned = getattr(fused, f"rotary_{kernel}_kernel")
        monkeypatch.setattr(tuned, "configs", tuned.configs[1:2])  # several are timed on a GPU; this has blocks of two
    torch.manual_seed(rank)
    tokens = sum(LENGTHS) // context
    group = SimpleNamespace(rank=lambda: rank, size=lambda: context)
    ends = packed_sequences(LENGTHS, torch.device("cpu")).cu_seqlens_q_padded
    half = torch.outer(torch.arange(max(LENGTHS)), 10.0 ** -torch.arange(ROPE // 2))
    angles = torch.cat([half, half], -1)[:, None, None]
    shapes = ((tokens, HEADS, NOPE + ROPE), (tokens, HEADS, NOPE + VALUE), (tokens, 1, ROPE))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    results = []
    for outputs in (plain, fused_outputs):
        values = outputs(*inputs, angles, scale, ends, group)
        weights = [torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) for value in values]
        loss = sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
        results.append([*values, *torch.autograd.grad(loss, inputs)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
