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
def test_values_and_gradient_are_those_of_megatron(latent, rotary_dim, batch):
    ours = rope_utils._apply_rotary_pos_emb_bshd
    stock, freqs = ours.args[0], angles(rotary_dim, batch)
    whole = torch.randn(TOKENS, batch, HEADS, SIZE + 4)
    grad = torch.randn(TOKENS, batch, HEADS, SIZE)
    found = []
    for function in (ours, stock):
        leaf = whole.clone().requires_grad_()
        out = function(leaf[..., 4:], freqs, multi_latent_attention=latent, mscale=1.3)  # not contiguous, as in a model
        out.backward(grad)
        found.append((out.detach(), leaf.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_pair_turns_by_its_angle():
    x, freqs = torch.randn(TOKENS, 1, HEADS, SIZE, dtype=torch.float64), angles(SIZE).double()
    out = rope_utils._apply_rotary_pos_emb_bshd(x, freqs)
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(()).double(), freqs[..., : SIZE // 2])
    torch.testing.assert_close(out, torch.cat((pairs.real, pairs.imag), -1))


def test_an_interleaved_embedding_is_megatrons_own():
    x, freqs = torch.randn(TOKENS, 1, HEADS, SIZE), torch.randn(TOKENS, 1, 1, SIZE)
    ours = rope_utils._apply_rotary_pos_emb_bshd
    assert torch.equal(ours(x, freqs, rotary_interleaved=True), ours.args[0](x, freqs, rotary_interleaved=True))
