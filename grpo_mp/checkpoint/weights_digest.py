"""Checksums of a model's weights by samples of each tensor: they differ where training has changed any of them."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.describe import is_converted

SAMPLE_BYTES = 4096
SAFETENSORS, DISTCP = WEIGHT_FILES = (".safetensors", ".distcp")
FILE_SAMPLES = 16  # of a file of weights that is not safetensors
OF_TENSORS = "tensors:"  # begins a digest with samples of every tensor; older ones have those of files alone
HEADER_LENGTH_BYTES, MAX_HEADER_BYTES = 8, 10**8  # of a safetensors file, as its library has them
READERS = 16  # files that are sampled at a time: the latency of a shared file system counts


def weights_digest(folder: Path) -> str:
    """Return a digest of the weights of a folder, by samples of each of its files.

    Of a safetensors file it reads the header, and of each tensor 4 KiB at the beginning, in the middle and at the end,
    or all of one of up to 12 KiB: 0.7 GB of the 91,991 tensors in DeepSeek-V3's 688 GB. Of another file it reads
    16 x 4 KiB. Raises OSError where a file cannot be read.
    """
    with ThreadPoolExecutor(READERS) as executor:
        parts = sorted(folder.glob(f"*/*{DISTCP}")) if is_converted(folder) else []
        digests = executor.map(_file_digest, [*_weight_files(folder), *parts])
        return OF_TENSORS + hashlib.sha256(b"".join(digests)).hexdigest()


def has_weights_digest(folder: Path, digest: str) -> bool:
    """Return whether `weights_digest`, of this version or of an older one, has made the digest of a folder."""
    if digest.startswith(OF_TENSORS):
        return digest == weights_digest(folder)
    former = hashlib.sha256()
    for file in _weight_files(folder):
        size = file.stat().st_size
        _add_samples(former, file, size, _samples_of_file(size))
    return digest == former.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_FILES)


def _file_digest(file: Path) -> bytes:
    size, digest = file.stat().st_size, hashlib.sha256()
    _add_samples(digest, file, size, _samples_of_tensors(file, size) or _samples_of_file(size))
    return digest.digest()


def _add_samples(digest: Any, file: Path, size: int, samples: Iterable[tuple[int, int]]) -> None:
    """Add a file's name, size and the bytes [start, stop) of each sample."""
    digest.update(f"{file.name} {size} ".encode())
    with file.open("rb", buffering=0) as stream:
        for start, stop in samples:
            digest.update(os.pread(stream.fileno(), stop - start, start))


def _samples_of_file(size: int) -> Iterator[tuple[int, int]]:
    for number in range(FILE_SAMPLES):
        start = max(0, size - SAMPLE_BYTES) * number // (FILE_SAMPLES - 1)
        yield start, start + SAMPLE_BYTES


def _samples_of_tensors(file: Path, size: int) -> list[tuple[int, int]]:
    """Return the header and samples of each tensor; none where the file is not safetensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
        if file.suffix != SAFETENSORS or length > min(size, MAX_HEADER_BYTES):
            return []
        try:
            header = json.loads(stream.read(length))
            offsets = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, TypeError, KeyError, AttributeError):
            return []
    data = HEADER_LENGTH_BYTES + length
    tensors = (_samples_of_tensor(data + start, data + stop) for start, stop in offsets)
    return [(0, data), *chain.from_iterable(tensors)]


def _samples_of_tensor(start: int, stop: int) -> list[tuple[int, int]]:
    if stop - start <= 3 * SAMPLE_BYTES:
        return [(start, stop)]
    firsts = (start, (start + stop - SAMPLE_BYTES) // 2, stop - SAMPLE_BYTES)
    return [(first, first + SAMPLE_BYTES) for first in firsts]
