"""Cut, fuse, unfuse and join, on every family; and what the fused rows mean to Megatron."""

import pytest
import torch
from torch import Tensor

from grpo_mp.models.families import FAMILIES
from grpo_mp.models.mapping import Param, Rule, expand, fuse, join, shard_range, unfuse
from tests.models.conftest import MakeHf


def numbered(param: Param) -> list[Tensor]:
    """Hugging Face tensors whose every element is another number."""
    sizes = [torch.Size(shape).numel() for shape in param.shapes]
    flat = torch.arange(1, sum(sizes) + 1).split(sizes)
    return [values.view(shape) for values, shape in zip(flat, param.shapes, strict=True)]


def megatron_shard(param: Param, wholes: list[Tensor], parts: int, part: int) -> Tensor:
    """As the loader makes it: slices of the files, fused, rows of vocabulary padding added."""
    pieces = []
    for whole in wholes:
        start, stop = (0, 0) if param.split is None else shard_range(param, tuple(whole.shape), parts, part)
        pieces.append(whole if param.split is None else whole.narrow(param.split, start, stop - start))
    shard = torch.zeros(param.local_shape(parts), dtype=torch.int64)
    fused = fuse(param, pieces)
    shard[: fused.shape[0]] = fused
    return shard


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_whole_to_shards_to_whole_is_the_identity(family: str, parts: int, tied: bool, make_hf: MakeHf) -> None:
    hf = make_hf(family, tie_word_embeddings=tied)  # four ranks do not divide its vocabulary of 10
    for param in FAMILIES[family].params(hf).values():
        wholes = numbered(param)
        shards = [megatron_shard(param, wholes, parts, part) for part in range(parts)]
        pieces = [unfuse(param, shard) for shard in shards]
        if not param.vocabulary:
            assert [tuple(piece.shape) for piece in pieces[0]] == list(param.shard_shapes(parts))
        for found, expected in zip(join(param, pieces), wholes, strict=True):
            assert torch.equal(found, expected), param.name
        for shard, unfused in zip(shards, pieces, strict=True):
            assert torch.equal(fuse(param, unfused), shard), param.name


@pytest.mark.parametrize("parts", [2, 4])
def test_each_element_is_on_one_rank_or_on_all(family: str, parts: int, make_hf: MakeHf) -> None:
    for param in FAMILIES[family].params(make_hf(family)).values():
        wholes = numbered(param)
        held = torch.cat([megatron_shard(param, wholes, parts, part).flatten() for part in range(parts)])
        counts = torch.bincount(held)[1:]
        assert len(counts) == sum(whole.numel() for whole in wholes)
        assert set(counts.tolist()) == {parts if param.split is None else 1}, param.name


def test_only_vocabularies_are_padded(make_hf: MakeHf) -> None:
    params = FAMILIES["qwen3"].params(make_hf("qwen3"))
    embedding = params["embedding.word_embeddings.weight"]
    assert embedding.local_shape(4) == (3, 8)
    assert [shard_range(embedding, (10, 8), 4, part) for part in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [shard_range(embedding, (5, 8), 4, part) for part in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    with pytest.raises(ValueError, match=r"linear_fc2.weight: axis 1 of \(8, 16\) does not divide over 3 ranks"):
        params["decoder.layers.0.mlp.linear_fc2.weight"].local_shape(3)


def test_local_shapes(make_hf: MakeHf) -> None:
    params = FAMILIES["deepseek_v3"].params(make_hf("deepseek_v3"))
    layer = "decoder.layers.2."
    assert params[layer + "mlp.experts.linear_fc1.weight7"].local_shape(2) == (12, 8)
    assert params[layer + "mlp.experts.linear_fc2.weight0"].local_shape(2) == (8, 6)
    assert params[layer + "mlp.router.weight"].local_shape(2) == (8, 8)
    assert params[layer + "mlp.shared_experts.linear_fc1.weight"].local_shape(2) == (24, 8)
    qkv = FAMILIES["qwen3"].params(make_hf("qwen3"))["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv.local_shape(2) == (4 * (8 + 2 * 4) // 2, 8)


def test_fused_rows_stand_by_query_group_as_megatron_splits_them(make_hf: MakeHf) -> None:
    param = FAMILIES["qwen3"].params(make_hf("qwen3"))["decoder.layers.0.self_attention.linear_qkv.weight"]
    query, key, value = numbered(param)
    groups, per_group, head_dim = 4, 2, 4
    # Megatron views the projection as [groups, (queries of a group + key + value) x head_dim] and splits that.
    rows = fuse(param, [query, key, value]).view(groups, (per_group + 2) * head_dim, -1)
    for group in range(groups):
        q, k, v = rows[group].split([per_group * head_dim, head_dim, head_dim])
        assert torch.equal(q, query[group * per_group * head_dim : (group + 1) * per_group * head_dim])
        assert torch.equal(k, key[group * head_dim : (group + 1) * head_dim])
        assert torch.equal(v, value[group * head_dim : (group + 1) * head_dim])


def test_gate_stands_before_up(make_hf: MakeHf) -> None:
    param = FAMILIES["qwen3"].params(make_hf("qwen3"))["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = numbered(param)
    assert torch.equal(fuse(param, [gate, up]), torch.cat([gate, up]))
    assert [name.rpartition("mlp.")[2] for name in param.hf] == ["gate_proj.weight", "up_proj.weight"]


def test_expand_fills_in_layers_and_experts() -> None:
    rules = [
        Rule("a.{layer}.w{expert}", ("x.{layer}.{expert}",), ((2, 3),), layers=(1, 4), experts=2),
        Rule("b", ("y",), ((5,),)),
    ]
    params = expand(rules)
    assert list(params) == ["a.1.w0", "a.1.w1", "a.4.w0", "a.4.w1", "b"]
    assert (params["a.4.w1"].hf, params["a.4.w1"].layer, params["a.4.w1"].expert) == (("x.4.1",), 4, 1)
    assert (params["b"].layer, params["b"].expert, params["b"].experts) == (None, None, 0)
    with pytest.raises(ValueError, match="two rules make b"):
        expand([*rules, Rule("b", ("z",), ((5,),))])
