"""Rectangles that other ranks wrote, in one process: each writes its share, another layout reads all."""

from pathlib import Path

import pytest
import torch

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
@pytest.mark.parametrize("written_as", [(4, 6), (4, 3), (1, 6), (1, 2), (2, 3)])
@pytest.mark.parametrize("read_as", [(4, 6), (4, 2), (1, 6), (2, 3), (4, 1)])
def test_any_rectangles_are_read_from_any(
    written_as: tuple[int, int], read_as: tuple[int, int], piece_bytes: int, tmp_path: Path
) -> None:
    whole = torch.arange(24.0).view(4, 6)
    written = [
        ChunkWriter(tmp_path, rank, [chunk], piece_bytes).write() for rank, chunk in enumerate(cut(whole, *written_as))
    ]
    write_index(tmp_path, written)
    chunks = cut(torch.zeros(4, 6), *read_as)
    read_chunks(chunks, tmp_path)
    for chunk, expected in zip(chunks, cut(whole, *read_as), strict=True):
        assert torch.equal(chunk.tensor, expected.tensor)


def test_only_the_rows_that_are_needed_are_read(tmp_path: Path) -> None:
    """Of one piece of 4 MiB, for eight ranks that read an eighth of it each."""
    whole = torch.randn(1024, 1024)
    write_index(tmp_path, [ChunkWriter(tmp_path, 0, cut(whole, 1024, 1024), whole.nbytes).write()])
    chunks = cut(torch.zeros(1024, 1024), 128, 1024)
    read_chunks(chunks[:1], tmp_path)  # opens and imports
    before = bytes_read()
    read_chunks(chunks[3:4], tmp_path)
    assert bytes_read() - before < 1.3 * chunks[3].tensor.nbytes
    assert torch.equal(chunks[3].tensor, whole[3 * 128 : 4 * 128])


def bytes_read() -> int:
    """Of this process, by the kernel's count."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])
