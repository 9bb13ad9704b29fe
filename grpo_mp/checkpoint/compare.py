"""Two Hugging Face folders, tensor by tensor: names, shapes, dtypes and values."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_mp.checkpoint.hf_reader import HfReader, Weights


@dataclass(frozen=True)
class Difference:
    """One way in which a tensor differs; `size` orders them: infinite, or the largest difference of values."""

    name: str
    what: str
    size: float


def compare_folders(one: Path, other: Path, tolerance: float = 0.0) -> list[Difference]:
    """`compare` of two Hugging Face folders. Raises UserError for a torn one."""
    with HfReader(one) as left, HfReader(other) as right:
        return compare(left, right, tolerance)


def compare(left: Weights, right: Weights, tolerance: float = 0.0) -> list[Difference]:
    """Every difference, the worst first; values count from a largest difference above `tolerance`.

    Tolerance 0 compares what is stored bit for bit. Holds one tensor of each side at a time.
    """
    found = list(_missing(left, right))
    for name in sorted(left.stored_names & right.stored_names):
        found += _compare(name, left, right, tolerance)
    return sorted(found, key=lambda difference: (-difference.size, difference.name))


def _missing(left: Weights, right: Weights) -> Iterator[Difference]:
    for has, lacks in ((left, right), (right, left)):
        for name in has.stored_names - lacks.stored_names:
            yield Difference(name, f"only in {has.folder}", float("inf"))


def _compare(name: str, left: Weights, right: Weights, tolerance: float) -> Iterator[Difference]:
    shapes = [list(reader.shape(name)) for reader in (left, right)]
    if shapes[0] != shapes[1]:
        yield Difference(name, f"shape {shapes[0]} and {shapes[1]}", float("inf"))
        return
    dtypes = [reader.dtype(name) for reader in (left, right)]
    if dtypes[0] != dtypes[1]:
        yield Difference(name, f"dtype {dtypes[0]} and {dtypes[1]}", float("inf"))
    stored = dtypes[0] == dtypes[1]
    one, other = (reader.read_stored(name) if stored else reader.read(name) for reader in (left, right))
    if stored and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
        return
    largest, count = _distance(one, other)
    if largest > tolerance or (tolerance == 0 and stored):
        yield Difference(name, f"{count} of {one.numel()} values differ, by {largest:.3g} at most", largest)


def _distance(one: torch.Tensor, other: torch.Tensor, rows: int = 2**22) -> tuple[float, int]:
    """Largest difference of values (infinite where one is NaN), and how many differ, a piece at a time."""
    largest, count = 0.0, 0
    for left, right in zip(one.flatten().split(rows), other.flatten().split(rows), strict=True):
        apart = (left.double() - right.double()).abs()
        unequal = left.double().ne(right.double()) | left.double().signbit().ne(right.double().signbit())
        count += int(unequal.sum())
        worst = float(apart[unequal].nan_to_num(nan=float("inf")).amax()) if bool(unequal.any()) else 0.0
        largest = max(largest, worst)
    return largest, count
