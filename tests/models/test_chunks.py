"""Chunks of every family's parameters: each element of a piece is found where its chunk says."""

import pytest
import torch

from grpo_mp.models.chunks import chunks_of, matrix_shape
from grpo_mp.models.families import FAMILIES
from tests.models.conftest import MakeHf
from tests.models.test_mapping import megatron_shard, numbered_tensors


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
