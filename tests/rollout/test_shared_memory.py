"""Export of a bucket over shared memory, opened by another process as an engine does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from grpo_mp.rollout.shared_memory import as_tensor, export_to_host, load_weights, specs_of

READER = """
import json, sys, torch
from grpo_mp.rollout.shared_memory import open_exports
metadata = torch.tensor(json.loads(sys.stdin.read()), dtype=torch.uint8)
print(json.dumps({name: [str(x.dtype), list(x.shape), x.double().sum().item()] for name, x in open_exports(metadata)}))
"""


def make_bucket() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 10, generator=generator)
    return [
        ("odd", torch.randn(3, 5, generator=generator)),
        ("half", torch.randn(9, generator=generator).bfloat16()),
        ("transposed", matrix.T),
        ("slice", matrix[2:4]),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.empty(0, 4)),
        ("whole_numbers", torch.arange(5)),
    ]


def test_another_process_opens_exported_tensors() -> None:
    bucket = make_bucket()
    with export_to_host(list(bucket), specs_of(bucket)) as export:
        reader = subprocess.run(
            [sys.executable, "-c", READER],
            input=json.dumps(as_tensor([export]).tolist()),
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            check=True,
        )
    expected = {name: [str(x.dtype), list(x.shape), x.double().sum().item()] for name, x in bucket}
    assert json.loads(reader.stdout) == expected


def test_export_closes_its_file_descriptor() -> None:
    before, bucket = os.listdir("/proc/self/fd"), make_bucket()
    with pytest.raises(ZeroDivisionError), export_to_host(list(bucket), specs_of(bucket)):
        raise ZeroDivisionError
    assert os.listdir("/proc/self/fd") == before


class OneLayer(torch.nn.Module):
    """A weight, and the scales of an FP8 cache that SGLang makes as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.attention = torch.nn.Module()
        for name in ("k_scale", "v_scale"):
            setattr(self.attention, name, torch.nn.Parameter(torch.tensor(torch.nan), requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


def test_a_sync_sets_the_scales_of_an_fp8_cache_to_one() -> None:
    """Memory that an engine gave back when it slept is undefined when it wakes."""
    model, bucket = OneLayer(), [("weight", torch.arange(3.0))]
    with export_to_host(list(bucket), specs_of(bucket)) as export:
        load_weights(model, [("", as_tensor([export]))])
    assert model.weight.tolist() == [0, 1, 2]
    assert (model.attention.k_scale.item(), model.attention.v_scale.item()) == (1, 1)
