"""Slice, fuse, unfuse and join on every family; the order of fused rows; chunks of parameters."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_mp.models.chunks import chunks_of, matrix_shape
from grpo_mp.models.families import FAMILIES
from grpo_mp.models.mapping import Param, fuse, join, shard_ranges, unfuse
from tests.models.conftest import MakeHf


def numbered_tensors(param: Param) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in param.shapes]
    flat = torch.arange(1, sum(sizes) + 1).split(sizes)
    return [values.view(shape) for values, shape in zip(flat, param.shapes, strict=True)]


def megatron_shard(param: Param, tensors: list[Tensor], tp_size: int, tp_rank: int) -> Tensor:
    """As the loader makes it: slices of the files, fused, with rows of vocabulary padding."""
    slices = []
    for index, tensor in enumerate(tensors):
        if param.tp_dim is None:
            slices.append(tensor)
        else:
            ranges = shard_ranges(param, index, tp_size, tp_rank)
            parts = [tensor.narrow(param.tp_dim, start, stop - start) for start, stop in ranges]
            slices.append(torch.cat(parts, dim=param.tp_dim))
    shard = torch.zeros(param.local_shape(tp_size), dtype=tensors[0].dtype)
    fused = fuse(param, slices)
    shard[: fused.shape[0]] = fused
    return shard


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_shards_join_to_the_same_tensors(family: str, tp_size: int, tied: bool, make_hf: MakeHf) -> None:
    hf = make_hf(family, tie_word_embeddings=tied)  # four ranks do not divide its vocabulary of 10
    for param in FAMILIES[family].params(hf).values():
        tensors = numbered_tensors(param)
        shards = [megatron_shard(param, tensors, tp_size, tp_rank) for tp_rank in range(tp_size)]
        unfused = [unfuse(param, shard) for shard in shards]
        if not param.vocabulary:
            shapes = [param.shard_shape(shape, tp_size) for shape in param.shapes]
            assert [tuple(tensor.shape) for tensor in unfused[0]] == shapes
        for joined, tensor in zip(join(param, unfused), tensors, strict=True):
            assert torch.equal(joined, tensor), param.name
        for shard, slices in zip(shards, unfused, strict=True):
            assert torch.equal(fuse(param, slices), shard), param.name


@pytest.mark.parametrize("tp_size", [2, 4])
def test_each_element_is_on_one_rank_or_on_all(family: str, tp_size: int, make_hf: MakeHf) -> None:
    for param in FAMILIES[family].params(make_hf(family)).values():
        tensors = numbered_tensors(param)
        shards = [megatron_shard(param, tensors, tp_size, tp_rank) for tp_rank in range(tp_size)]
        counts = torch.bincount(torch.cat([shard.flatten() for shard in shards]))[1:]
        assert len(counts) == sum(tensor.numel() for tensor in tensors)
        assert set(counts.tolist()) == {tp_size if param.tp_dim is None else 1}, param.name


def test_only_vocabularies_are_padded(make_hf: MakeHf) -> None:
    params = FAMILIES["qwen3"].params(make_hf("qwen3"))
    embedding = params["embedding.word_embeddings.weight"]
    assert embedding.local_shape(4) == (3, 8)
    for rows, ranges in ((10, [(0, 3), (3, 6), (6, 9), (9, 10)]), (5, [(0, 2), (2, 4), (4, 5), (5, 5)])):
        param = replace(embedding, shapes=((rows, 8),))
        assert [shard_ranges(param, 0, 4, rank) for rank in range(4)] == [[range_] for range_ in ranges]
    with pytest.raises(ValueError, match=r"linear_fc2.weight: axis 1 of \(8, 16\) does not divide over 3 ranks"):
        params["decoder.layers.0.mlp.linear_fc2.weight"].local_shape(3)


def test_qkv_rows_are_ordered_by_query_group_as_megatron_splits_them(make_hf: MakeHf) -> None:
    param = FAMILIES["qwen3"].params(make_hf("qwen3"))["decoder.layers.0.self_attention.linear_qkv.weight"]
    query, key, value = numbered_tensors(param)
    groups = 4
    per_group = 2
    head_dim = 4
    # Megatron views the projection as [groups, (queries of a group + key + value) x head_dim] and splits that.
    rows = fuse(param, [query, key, value]).view(groups, (per_group + 2) * head_dim, -1)
    for group in range(groups):
        q, k, v = rows[group].split([per_group * head_dim, head_dim, head_dim])
        assert torch.equal(q, query[group * per_group * head_dim : (group + 1) * per_group * head_dim])
        assert torch.equal(k, key[group * head_dim : (group + 1) * head_dim])
        assert torch.equal(v, value[group * head_dim : (group + 1) * head_dim])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_pieces_are_the_elements_at_their_chunks(family: str, tp_size: int, make_hf: MakeHf) -> None:
    generator = torch.Generator().manual_seed(tp_size)
    for param in FAMILIES[family].params(make_hf(family)).values():
        tensors = numbered_tensors(param)
        matrices = [tensor.view(matrix_shape(tuple(tensor.shape))) for tensor in tensors]
        for part in range(tp_size if param.tp_dim is not None else 1):
            shard = megatron_shard(param, tensors, tp_size, part).flatten()
            bounds = torch.randint(0, len(shard) + 1, (6,), generator=generator).tolist()
            for start, stop in ((0, len(shard)), *zip(*[iter(sorted(bounds))] * 2, strict=True)):
                chunks = list(chunks_of(param, tp_size, part, start, stop))
                found = torch.zeros(len(shard), dtype=torch.int64)
                for chunk in chunks:
                    rows, *columns = (slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                    assert start <= chunk.start <= chunk.stop <= stop
                    assert not found[chunk.start : chunk.stop].any()
                    found[chunk.start : chunk.stop] = matrices[chunk.tensor][(rows, *columns)].flatten()
                assert torch.equal(found[start:stop], shard[start:stop]), param.name  # 0 is padding
