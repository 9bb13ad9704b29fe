"""Equal tensors, and only they, have equal checksums."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from grpo_mp.trainer import replica_check
from grpo_mp.trainer.replica_check import checksum


@pytest.fixture(autouse=True)
def several_chunks_in_small_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replica_check, "CHUNK", 64)
    replica_check._random_factors.cache_clear()
    yield
    replica_check._random_factors.cache_clear()


def bits(tensor: Tensor) -> int:
    return int(checksum(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (129, 33)])
def test_equal_tensors_and_only_they_have_equal_checksums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert bits(tensor) == bits(tensor.clone())
    seen = {bits(tensor)}
    for place in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[place] = torch.nextafter(other.view(-1)[place].float(), torch.tensor(9e9)) * 2
        seen.add(bits(other))
    assert len(seen) == tensor.numel() + 1


def test_order_counts_within_a_word_between_words_and_between_chunks() -> None:
    tensor = torch.arange(64 * 4 * 3, dtype=torch.bfloat16)
    for one, other in ((0, 1), (0, 4), (3, 3 + 64 * 4), (5, -1)):
        swapped = tensor.clone()
        swapped[one] = tensor[other]
        swapped[other] = tensor[one]
        assert bits(swapped) != bits(tensor)


def test_small_updates_that_cancel_in_sums_are_seen() -> None:
    """A bias of experts moves by the same step up and down, a weight by its last bit, in the same lane of each word."""
    generator = torch.Generator().manual_seed(5)
    seen = set()
    base = torch.ones(256, dtype=torch.bfloat16)
    for _ in range(20_000):
        lanes = base.view(torch.int16).clone()
        lanes[3::4] += torch.randint(-1, 2, (64,), generator=generator, dtype=torch.int16)
        seen.add(bits(lanes.view(torch.bfloat16)))
    assert len(seen) == 20_000


def test_a_view_has_the_checksum_of_its_copy() -> None:
    matrix = torch.randn(40, 30)
    assert bits(matrix.t()) == bits(matrix.t().clone()) != bits(matrix)
