"""A tensor inside a larger file is read as torch.load reads it; what is no plain tensor is left to torch."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from grpo_mp.checkpoint.torch_dist_reader import read_into


def save_all(folder: Path, *values: object) -> list[tuple[int, int]]:
    """Save archives one after the other in one file; returns start and length of each."""
    slices, content = [], b"before"
    for value in values:
        stream = io.BytesIO()
        torch.save(value, stream)
        slices.append((len(content), len(stream.getvalue())))
        content += stream.getvalue()
    (folder / "file").write_bytes(content)
    return slices


@pytest.fixture(autouse=True, params=[True, False])
def _checksums(request: pytest.FixtureRequest) -> Iterator[None]:
    """Archives with checksums, and without, as `grpo-mp convert` writes them."""
    before = get_crc32_options()
    set_crc32_options(request.param)
    yield
    set_crc32_options(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_each_of_several_tensors_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).mul(100).to(dtype) for shape in ((3, 5), (64, 1000), (1, 2, 7))]
    for tensor, (start, length) in zip(tensors, save_all(tmp_path, *tensors), strict=True):
        out = torch.zeros_like(tensor)
        assert read_into(tmp_path / "file", start, length, out)
        assert torch.equal(out.view(torch.uint8), tensor.view(torch.uint8))


def test_other_values_are_left_to_torch(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    others = (tensor[1:], tensor.t(), {"a": tensor}, tensor.double())
    for other, (start, length) in zip(others, save_all(tmp_path, *others), strict=True):
        out = torch.zeros(other.shape if isinstance(other, torch.Tensor) else (3, 4))
        assert not read_into(tmp_path / "file", start, length, out)
        assert not out.any()


def test_names_in_a_pickle_are_not_called(tmp_path: Path) -> None:
    ((start, length),) = save_all(tmp_path, Path("/"))
    assert not read_into(tmp_path / "file", start, length, torch.zeros(2))
