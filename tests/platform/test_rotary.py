"""Rotary embedding on a CPU against Megatron's own function and the formula in float64."""

import megatron.core  # noqa: F401
import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

TOKENS, HEADS, SIZE = 13, 3, 16


def angles(rotary_dim: int, batch: int = 1) -> torch.Tensor:
    half = torch.randn(TOKENS, batch, 1, rotary_dim // 2) * 40
    return torch.cat((half, half), -1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rotary_dim", [SIZE, SIZE // 2])
@pytest.mark.parametrize("latent", [False, True])
def test_values_and_gradients_equal_megatron(latent, rotary_dim, batch):
    patched = rope_utils._apply_rotary_pos_emb_bshd
    stock, freqs = patched.args[0], angles(rotary_dim, batch)
    x = torch.randn(TOKENS, batch, HEADS, SIZE + 4)
    grad = torch.randn(TOKENS, batch, HEADS, SIZE)
    results = []
    for function in (patched, stock):
        leaf = x.clone().requires_grad_()
        out = function(leaf[..., 4:], freqs, multi_latent_attention=latent, mscale=1.3)  # not contiguous, as in a model
        out.backward(grad)
        results.append((out.detach(), leaf.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_pairs_are_rotated_by_their_angles():
    x, freqs = torch.randn(TOKENS, 1, HEADS, SIZE, dtype=torch.float64), angles(SIZE).double()
    out = rope_utils._apply_rotary_pos_emb_bshd(x, freqs)
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(()).double(), freqs[..., : SIZE // 2])
    torch.testing.assert_close(out, torch.cat((pairs.real, pairs.imag), -1))
