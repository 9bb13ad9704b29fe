"""Recognize the format of a checkpoint folder, count parameters, and compare two folders tensor by tensor."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_mp.checkpoint.chunk_files import INDEX
from grpo_mp.checkpoint.hf_reader import WeightsReader, has_hf_weights
from grpo_mp.models.mapping import Param

TORCH_DIST = ".metadata"  # file that every torch_dist checkpoint has
OPTIMIZER_FOLDER = "optimizer"  # folder of the optimizer state, inside the folder of the weights
WEIGHT = "weight"  # prefix of weights in a run's checkpoint, as in weight/model.norm.weight


def is_torch_dist(folder: Path) -> bool:
    """Return whether the folder is in the torch_dist format."""
    return (folder / TORCH_DIST).is_file()


def is_saved(folder: Path) -> bool:
    """Return whether the folder is a run's checkpoint, or the folder `policy` in one."""
    return (policy_folder(folder) / INDEX).is_file()


def policy_folder(checkpoint: Path) -> Path:
    """Return the folder `policy` of a run's checkpoint; return `checkpoint` itself if it has none."""
    return checkpoint / "policy" if (checkpoint / "policy").is_dir() else checkpoint


def is_converted(folder: Path) -> bool:
    """Return whether the folder has weights in the torch_dist format, and none in safetensors files."""
    return is_torch_dist(folder) and not has_hf_weights(folder)


def count_parameters(params: Iterable[Param], experts_per_token: int | None = None) -> int:
    """Return the number of parameters; with `experts_per_token`, only of those that are active for one token."""
    return sum(
        param.num_elements
        for param in params
        if not param.alias and (experts_per_token is None or param.expert is None or param.expert < experts_per_token)
    )


@dataclass(frozen=True)
class Difference:
    """One difference between two folders."""

    name: str  # of the tensor
    description: str
    size: float  # largest absolute difference of values; infinite for a missing tensor, another shape or dtype


def compare_weights(left: WeightsReader, right: WeightsReader, tolerance: float = 0.0) -> list[Difference]:
    """Return all differences above `tolerance`, the largest first. With tolerance 0, tensors are compared bitwise."""
    differences = [
        Difference(name, f"only in {reader.folder}", float("inf"))
        for reader, other in ((left, right), (right, left))
        for name in reader.stored_names - other.stored_names
    ]
    for name in sorted(left.stored_names & right.stored_names):
        differences += _compare_tensor(name, left, right, tolerance)
    return sorted(differences, key=lambda difference: (-difference.size, difference.name))


def _compare_tensor(name: str, left: WeightsReader, right: WeightsReader, tolerance: float) -> Iterator[Difference]:
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
    largest, count = 0.0, 0
    for x, y in zip(a.flatten().split(chunk_size), b.flatten().split(chunk_size), strict=True):
        difference = (x.double() - y.double()).abs()
        unequal = x.double().ne(y.double()) | x.double().signbit().ne(y.double().signbit())
        count += int(unequal.sum())
        if bool(unequal.any()):
            largest = max(largest, float(difference[unequal].nan_to_num(nan=float("inf")).amax()))
    return largest, count
