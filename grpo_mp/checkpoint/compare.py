"""Compare the weights of two Hugging Face folders tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from grpo_mp.checkpoint.hf_reader import HfReader


@dataclass(frozen=True)
class Difference:
    """One difference between two folders."""

    name: str  # of the tensor
    description: str
    size: float  # largest absolute difference of values; infinite for a missing tensor, another shape or dtype


def compare_weights(left: HfReader, right: HfReader, tolerance: float = 0.0) -> list[Difference]:
    """Return all differences above `tolerance`, the largest first. With tolerance 0, tensors are compared bitwise."""
    differences = [
        Difference(name, f"only in {reader.folder}", float("inf"))
        for reader, other in ((left, right), (right, left))
        for name in reader.stored_names - other.stored_names
    ]
    for name in sorted(left.stored_names & right.stored_names):
        differences += _compare_tensor(name, left, right, tolerance)
    return sorted(differences, key=lambda difference: (-difference.size, difference.name))


def _compare_tensor(name: str, left: HfReader, right: HfReader, tolerance: float) -> Iterator[Difference]:
    shapes = [list(reader.shape(name)) for reader in (left, right)]
    if shapes[0] != shapes[1]:
        yield Difference(name, f"shape {shapes[0]} and {shapes[1]}", float("inf"))
        return
    dtypes = [reader.dtype(name) for reader in (left, right)]
    same_dtype = dtypes[0] == dtypes[1]
    if not same_dtype:
        yield Difference(name, f"dtype {dtypes[0]} and {dtypes[1]}", float("inf"))
    a, b = (reader.read_stored(name) if same_dtype else reader.read(name) for reader in (left, right))
    if same_dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
        return
    largest, count = _largest_difference(a, b)
    if largest > tolerance or (tolerance == 0 and same_dtype):
        yield Difference(name, f"{count} of {a.numel()} values differ, by {largest:.3g} at most", largest)


def _largest_difference(a: torch.Tensor, b: torch.Tensor, chunk_size: int = 2**22) -> tuple[float, int]:
    """Return the largest absolute difference of values (infinite for NaN), and the number of values that differ."""
    largest = 0.0
    count = 0
    for x, y in zip(a.flatten().split(chunk_size), b.flatten().split(chunk_size), strict=True):
        difference = (x.double() - y.double()).abs()
        unequal = x.double().ne(y.double()) | x.double().signbit().ne(y.double().signbit())
        count += int(unequal.sum())
        if bool(unequal.any()):
            largest = max(largest, float(difference[unequal].nan_to_num(nan=float("inf")).amax()))
    return largest, count
