"""Packed attention against explicit attention of one sequence at a time, in float64."""

from itertools import chain

import megatron.core  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from grpo_mp.platform.attention import Attention
from grpo_mp.platform.packed_attention import (
    Softmax,
    bucket_by_length,
    packed_attention,
    plan_packing,
    zigzag_positions,
)

LENGTHS = (5, 1, 17, 16, 0, 9, 40)
SCALE = 0.3


def one_sequence(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return causal softmax attention of one sequence [T, heads, dim], independent of the code under test."""
    repeat = query.size(1) // key.size(1)
    key = key.repeat_interleave(repeat, 1)
    value = value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    position = torch.arange(len(key))
    distance = position[len(key) - len(query) :, None] - position
    hidden = (distance < 0) | (distance >= (window or len(key)))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("hqk,khd->qhd", weights / total, value)


def per_sequence(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    sequences = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    return torch.cat([one_sequence(*qkv) for qkv in sequences if len(qkv[0])])


def random_qkv(total: int, heads: tuple[int, int], dims: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(total, heads[0], dims[0]), (total, heads[1], dims[0]), (total, heads[1], dims[1])]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def with_gradients(attend, tensors: list[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = attend(*leaves)
    out.backward(weight.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)], ids=["grouped", "one"])
@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (8, 16)], ids=["equal", "latent", "wide_value"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_output_and_gradients(heads, dims, dtype, tolerance):
    inputs = [t.to(dtype) for t in random_qkv(sum(LENGTHS), heads, dims)]
    weight = torch.randn(sum(LENGTHS), heads[0], dims[1]).to(dtype)
    expected = with_gradients(lambda *qkv: per_sequence(*qkv, LENGTHS), [t.double() for t in inputs], weight)
    packing = plan_packing(LENGTHS)
    actual = with_gradients(lambda *qkv: packed_attention(*qkv, packing, Softmax(SCALE)), inputs, weight)
    for tensor, reference in zip(actual, expected, strict=True):
        assert tensor.dtype is dtype
        assert (tensor.double() - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_windows_and_sinks_with_prefixes(window, has_sinks):
    """Output and gradients, those of the sinks, too; windows that end in a prefix, at its end or behind it."""
    lengths = (5, 1, 17, 16, 3)
    prefixes = (0, 4, 0, 4, 12)
    key_lengths = tuple(n + prefix for n, prefix in zip(lengths, prefixes, strict=True))
    key, value = random_qkv(sum(key_lengths), (4, 2), (8, 8))[1:]
    query, weight = random_qkv(sum(lengths), (4, 4), (8, 8))[:2]
    sinks = torch.linspace(-1.0, 2.0, 4, dtype=torch.float64)

    def expected(query, key, value, sinks):
        parts = zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True)
        return (
            torch.cat([one_sequence(*part, window, sinks if has_sinks else None) for part in parts]) + 0 * sinks.sum()
        )

    def actual(query, key, value, sinks):
        softmax = Softmax(SCALE, window, sinks if has_sinks else None)
        return packed_attention(query, key, value, plan_packing(lengths, prefixes=prefixes), softmax) + 0 * sinks.sum()

    inputs = [query, key, value, sinks]
    references = with_gradients(expected, inputs, weight)
    for tensor, reference in zip(with_gradients(actual, [t.float() for t in inputs], weight), references, strict=True):
        assert (tensor.double() - reference).abs().max() <= 2e-6 * max(1.0, reference.abs().max())


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_sum_to_the_unsplit_result(cp):
    """Sum the ranks' outputs and gradients, without a process group."""
    lengths = (16, 48, 8, 40)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    local = [  # row numbers of the tokens on each rank
        torch.cat([zigzag_positions(n, cp, r) + b for n, b in zip(lengths, bounds, strict=False)]) for r in range(cp)
    ]
    query, key, value = random_qkv(sum(lengths), (4, 2), (24, 16))
    weight = torch.randn(sum(lengths), 4, 16, dtype=torch.float64)
    expected = with_gradients(lambda *qkv: per_sequence(*qkv, lengths), [query, key, value], weight)

    gathered = torch.cat(local)
    sums = [torch.zeros_like(t) for t in expected]
    for rank in range(cp):
        packing = plan_packing(lengths, cp, rank)
        inputs = [query[local[rank]], key[gathered], value[gathered]]
        results = with_gradients(
            lambda *qkv, p=packing: packed_attention(*qkv, p, Softmax(SCALE)),
            [t.float() for t in inputs],
            weight[local[rank]],
        )
        rows = (local[rank], local[rank], gathered, gathered)
        for total, tensor, tensor_rows in zip(sums, results, rows, strict=True):
            total.index_add_(0, tensor_rows, tensor.double())
    for total, reference in zip(sums, expected, strict=True):
        torch.testing.assert_close(total, reference, rtol=0, atol=2e-6 * reference.abs().max().item())


@given(st.lists(st.integers(0, 500), max_size=30))
def test_buckets_hold_each_sequence_once_with_little_padding(lengths):
    buckets = bucket_by_length(tuple(lengths))
    assert sorted(chain(*buckets)) == [i for i, n in enumerate(lengths) if n]
    cells = sum(len(bucket) * max(lengths[i] for i in bucket) for bucket in buckets)
    assert cells * 4 <= sum(lengths) * 5


def attention(**changes) -> Attention:
    fields = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0} | changes
    config = TransformerConfig(**fields)
    return Attention(config, attn_mask_type=AttnMaskType.causal, attention_type="self", layer_number=1)


def test_batch_equals_each_row():
    query, key, value = (torch.randn(7, 3, 4, 8) for _ in range(3))
    out = attention()(query, key, value, None)
    for row in range(3):
        q, k, v = (x[:, row].transpose(0, 1) for x in (query, key, value))
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        torch.testing.assert_close(out[:, row].double(), expected.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-6)
