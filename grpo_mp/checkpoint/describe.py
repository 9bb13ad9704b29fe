"""Tell kinds of folders apart, count parameters, and compare two folders tensor by tensor."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_mp.checkpoint.chunk_files import INDEX
from grpo_mp.checkpoint.hf_reader import WeightsReader, has_hf_weights
from grpo_mp.models.mapping import Param

TORCH_DIST = ".metadata"  # the file that makes a folder a torch_dist checkpoint
OPTIMIZER_FOLDER = "optimizer"  # in that of the weights: the state of the optimizer
WEIGHT = "weight"  # in a run's checkpoints weight/model.norm.weight is that Hugging Face tensor


def is_torch_dist(folder: Path) -> bool:
    """Return whether the folder is in the torch_dist format."""
    return (folder / TORCH_DIST).is_file()


def is_saved(folder: Path) -> bool:
    """Return whether the folder is a checkpoint of a run, or its folder `policy`."""
    return (policy_folder(folder) / INDEX).is_file()


def policy_folder(checkpoint: Path) -> Path:
    """Return the folder of the policy in a run's checkpoint, or that folder itself."""
    return checkpoint / "policy" if (checkpoint / "policy").is_dir() else checkpoint


def is_converted(folder: Path) -> bool:
    """Return whether the folder's weights are in the torch_dist format alone."""
    return is_torch_dist(folder) and not has_hf_weights(folder)


def count_parameters(params: Iterable[Param], experts_per_token: int | None = None) -> int:
    """Count the parameters of a model; with `experts_per_token`, those active for one token."""
    return sum(
        param.num_elements
        for param in params
        if not param.alias and (experts_per_token is None or param.expert is None or param.expert < experts_per_token)
    )


@dataclass(frozen=True)
class Difference:
    """One way in which a tensor differs; `size` orders them: infinite, or the largest difference of values."""

    name: str
    description: str
    size: float


def compare_weights(left: WeightsReader, right: WeightsReader, tolerance: float = 0.0) -> list[Difference]:
    """Return every difference above `tolerance`, the worst first. Tolerance 0 compares bit for bit."""
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
    """Return the largest difference of values (infinite for NaN), and how many differ, a chunk at a time."""
    largest, count = 0.0, 0
    for x, y in zip(a.flatten().split(chunk_size), b.flatten().split(chunk_size), strict=True):
        difference = (x.double() - y.double()).abs()
        unequal = x.double().ne(y.double()) | x.double().signbit().ne(y.double().signbit())
        count += int(unequal.sum())
        if bool(unequal.any()):
            largest = max(largest, float(difference[unequal].nan_to_num(nan=float("inf")).amax()))
    return largest, count
