"""Rectangles that other ranks wrote, in one process: each writes its share, another layout reads all."""

from io import FileIO
from pathlib import Path

import pytest
import torch

from grpo_mp.checkpoint import chunk_files
from grpo_mp.checkpoint.chunk_files import ChunkWriter, TensorChunk, read_chunks, write_index


def cut(tensor: torch.Tensor, rows: int, columns: int) -> list[TensorChunk]:
    """Return the rectangles of a matrix, as ranks keep them: each in memory of its own."""
    shape = tuple(tensor.shape)
    return [
        TensorChunk(
            "weight/w", shape, (row, column), tensor[row : row + rows, column : column + columns].clone(), False
        )
        for row in range(0, shape[0], rows)
        for column in range(0, shape[1], columns)
    ]


@pytest.mark.parametrize("piece_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("written_as", [(4, 6), (4, 3), (1, 2)])
@pytest.mark.parametrize("read_as", [(4, 6), (4, 2), (1, 6), (2, 3)])
def test_any_rectangles_are_read_from_any(
    written_as: tuple[int, int],
    read_as: tuple[int, int],
    piece_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_files, "PIECE_BYTES", piece_bytes)
    whole = torch.arange(24.0).view(4, 6)
    written = [ChunkWriter(tmp_path, rank, [chunk]).write() for rank, chunk in enumerate(cut(whole, *written_as))]
    write_index(tmp_path, written)
    chunks = cut(torch.zeros(4, 6), *read_as)
    read_chunks(chunks, tmp_path)
    for chunk, expected in zip(chunks, cut(whole, *read_as), strict=True):
        assert torch.equal(chunk.tensor, expected.tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["into its place", "through a strip"])
def test_only_the_columns_that_are_needed_are_read(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one piece of 16 MiB, for eight ranks that read an eighth of each row."""
    whole = torch.randn(1024, 4096)
    write_index(tmp_path, [ChunkWriter(tmp_path, 0, cut(whole, 1024, 4096)).write()])
    monkeypatch.setattr(chunk_files, "PIECE_BYTES", 2**20)
    chunks = cut(torch.zeros(1024, 4096, dtype=dtype), 1024, 512)
    read_chunks(chunks[:1], tmp_path)  # opens and imports
    before = bytes_read()
    read_chunks(chunks[3:4], tmp_path)
    assert bytes_read() - before < 1.3 * whole.nbytes / 8
    assert torch.equal(chunks[3].tensor, whole[:, 3 * 512 : 4 * 512].to(dtype))


@pytest.mark.parametrize("rows", [1, 3, 1024])
def test_what_is_read_goes_through_no_more_memory_than_a_piece(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the loader, whatever the save had: here all in one. Two columns of three are read with the third."""
    whole = torch.randn(1000, 3)
    sizes = list[int]()
    read = chunk_files.read_at

    def watched(stream: FileIO, place: int, memory: memoryview) -> bool:
        sizes.append(len(memory))
        return read(stream, place, memory)

    monkeypatch.setattr(chunk_files, "read_at", watched)
    write_index(tmp_path, [ChunkWriter(tmp_path, 0, cut(whole, 1000, 3)).write()])
    monkeypatch.setattr(chunk_files, "PIECE_BYTES", 12 * rows + 11)
    chunks = cut(torch.zeros(1000, 3), 1000, 2)
    read_chunks(chunks[:1], tmp_path)
    assert max(sizes) == 12 * min(rows, 1000)
    assert torch.equal(chunks[0].tensor, whole[:, :2])


def bytes_read() -> int:
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])
