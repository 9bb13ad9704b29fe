"""A tensor inside a larger file, read into place as torch.load reads it; what is not plain is left alone."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from grpo_mp.checkpoint.saved_tensor import read_into


def put(folder: Path, *saved: object) -> list[tuple[int, int]]:
    """Archives one after the other in one file; where each lies."""
    places, whole = [], b"before"
    for each in saved:
        stream = io.BytesIO()
        torch.save(each, stream)
        places.append((len(whole), len(stream.getvalue())))
        whole += stream.getvalue()
    (folder / "file").write_bytes(whole)
    return places


@pytest.fixture(autouse=True, params=[True, False])
def _checksums(request: pytest.FixtureRequest) -> Iterator[None]:
    """Archives with checksums, and without, as tools/convert.py writes them."""
    before = get_crc32_options()
    set_crc32_options(request.param)
    yield
    set_crc32_options(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_each_of_several_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).mul(100).to(dtype) for shape in ((3, 5), (64, 1000), (1, 2, 7))]
    for tensor, (start, length) in zip(tensors, put(tmp_path, *tensors), strict=True):
        out = torch.zeros_like(tensor)
        assert read_into(tmp_path / "file", start, length, out)
        assert torch.equal(out.view(torch.uint8), tensor.view(torch.uint8))


def test_what_is_not_plain_is_left_to_torch(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    others = (whole[1:], whole.t(), {"a": whole}, whole.double())
    for other, (start, length) in zip(others, put(tmp_path, *others), strict=True):
        out = torch.zeros(other.shape if isinstance(other, torch.Tensor) else (3, 4))
        assert not read_into(tmp_path / "file", start, length, out)
        assert not out.any()


def test_what_a_pickle_names_is_not_called(tmp_path: Path) -> None:
    ((start, length),) = put(tmp_path, Path("/"))
    assert not read_into(tmp_path / "file", start, length, torch.zeros(2))
