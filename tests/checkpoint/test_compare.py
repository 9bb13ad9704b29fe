"""Differences between two folders, the worst first; the summary of a folder against transformers' own count."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.compare import compare_weights
from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.models.fp8 import quantize

BASE = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.zeros(2), "nan": torch.tensor([float("nan")])}


def write_folder(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def differences(tmp_path: Path, changes: dict[str, Tensor], tolerance: float = 0.0) -> list[tuple[str, str]]:
    left, right = write_folder(tmp_path / "one", BASE), write_folder(tmp_path / "other", BASE | changes)
    result = compare_weights(HfReader(left), HfReader(right), tolerance)
    return [(difference.name, difference.description.replace(str(tmp_path), "")) for difference in result]


def test_the_worst_comes_first(tmp_path: Path) -> None:
    changes = {"a": BASE["a"] + 0.25, "b": BASE["b"].index_fill(0, torch.tensor([2]), 3.0), "d": torch.ones(1)}
    assert differences(tmp_path, changes | {"c": torch.zeros(3)}) == [
        ("c", "shape [2] and [3]"),
        ("d", "only in /other"),
        ("b", "1 of 4 values differ, by 2 at most"),
        ("a", "6 of 6 values differ, by 0.25 at most"),
    ]


@pytest.mark.parametrize(("tolerance", "count"), [(0.0, 1), (1e-9, 0)])
def test_a_negative_zero_is_a_difference_of_bits(tolerance: float, count: int, tmp_path: Path) -> None:
    assert len(differences(tmp_path, {"c": torch.tensor([0.0, -0.0])}, tolerance)) == count


def test_fp8_is_compared_by_its_values(tmp_path: Path) -> None:
    weight, scale = quantize(BASE["a"])
    result = differences(tmp_path, {"a": weight, "a_scale_inv": scale}, tolerance=0.2)
    assert result == [("a", "dtype torch.float32 and torch.float8_e4m3fn"), ("a_scale_inv", "only in /other")]
