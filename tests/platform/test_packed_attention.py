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
from grpo_mp.platform.packed_attention import bucket_by_length, packed_attention, plan_packing, zigzag_positions

LENGTHS = (5, 1, 17, 16, 0, 9, 40)
SCALE = 0.3


def one_sequence(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal softmax attention of one sequence [T, heads, dim], independent of the code under test."""
    repeat = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


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
    actual = with_gradients(lambda *qkv: packed_attention(*qkv, packing, SCALE), inputs, weight)
    for tensor, reference in zip(actual, expected, strict=True):
        assert tensor.dtype is dtype
        assert (tensor.double() - reference).abs().max() <= tolerance * reference.abs().max()


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
            lambda *qkv, p=packing: packed_attention(*qkv, p, SCALE), [t.float() for t in inputs], weight[local[rank]]
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
    return Attention(TransformerConfig(**fields), attn_mask_type=AttnMaskType.causal, attention_type="self")


def test_batch_equals_each_row():
    query, key, value = (torch.randn(7, 3, 4, 8) for _ in range(3))
    out = attention()(query, key, value, None)
    for row in range(3):
        q, k, v = (x[:, row].transpose(0, 1) for x in (query, key, value))
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        torch.testing.assert_close(out[:, row].double(), expected.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-6)
