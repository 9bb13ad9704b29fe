"""A bucket through shared memory, read by another process as an engine does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_mp.sync.host_memory import ALIGNMENT, LOADER, borrow, lend, load_bucket

READER = """
import json, sys, torch
from grpo_mp.sync.host_memory import borrow
note = torch.tensor(json.loads(sys.stdin.read()), dtype=torch.uint8)
print(json.dumps({name: [str(x.dtype), list(x.shape), x.double().sum().item()] for name, x in borrow(note)}))
"""


def make_bucket() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(7, 10, generator=generator)
    return [
        ("odd", torch.randn(3, 5, generator=generator)),
        ("half", torch.randn(9, generator=generator).bfloat16()),
        ("transposed", whole.T),
        ("slice", whole[2:4]),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.empty(0, 4)),
        ("whole_numbers", torch.arange(5)),
    ]


def test_another_process_reads_what_was_lent() -> None:
    bucket = make_bucket()
    with lend(bucket) as note:
        run = subprocess.run(
            [sys.executable, "-c", READER],
            input=json.dumps(note.tolist()),
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            check=True,
        )
    found = json.loads(run.stdout)
    expected = {name: [str(x.dtype), list(x.shape), x.double().sum().item()] for name, x in bucket}
    assert found == expected


def test_borrowed_tensors_outlive_the_loan_and_are_private() -> None:
    bucket = make_bucket()
    with lend(bucket) as note:
        kept, others = dict(borrow(note)), dict(borrow(note))
        kept["odd"].zero_()
    for name, tensor in bucket:
        assert torch.equal(others[name], tensor)
        assert others[name].data_ptr() % ALIGNMENT == 0
    with pytest.raises(RuntimeError):
        dict(borrow(note))


def test_a_loan_leaves_no_descriptor_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ZeroDivisionError), lend(make_bucket()):
        raise ZeroDivisionError
    assert os.listdir("/proc/self/fd") == before


def test_the_engine_loads_all_tensors_in_one_call() -> None:
    calls: list[list[str]] = []

    class Model:
        def load_weights(self, named) -> None:
            calls.append([name for name, _ in named])

    bucket = make_bucket()
    with lend(bucket) as note:
        load_bucket(Model(), [("note", note)])
    assert calls == [[name for name, _ in bucket]]
    module, _, function = LOADER.rpartition(".")
    assert getattr(sys.modules[module], function) is load_bucket
