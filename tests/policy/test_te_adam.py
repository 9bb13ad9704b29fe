"""What is added to TransformerEngine's Adam, with its own Python code: only its kernels need a GPU."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from grpo_mp.policy.te_adam import as_remainders
from tests.policy.gpu_python import last_line, transformer_engine

KEPT = {
    "plain": {"exp_avg": "torch.float32", "exp_avg_sq": "torch.float32", "main": "torch.float32"},
    "remainders": {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16", "master_param": "torch.int16"},
    "whole": {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16", "master_param": "torch.float32"},
    "float32 moments": {"exp_avg": "torch.float32", "exp_avg_sq": "torch.float32", "master_param": "torch.int16"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of states that were saved and loaded."""
    folder = tmp_path_factory.mktemp("round_trip")
    command = [sys.executable, "-m", "tests.policy.te_round_trip", str(transformer_engine()), str(folder)]
    return last_line(subprocess.run(command, capture_output=True, text=True, timeout=300))


@pytest.mark.parametrize("case", KEPT)
def test_the_state_is_kept_as_the_settings_say_and_comes_back_bit_for_bit(case: str, found: dict[str, Any]) -> None:
    one = found["cases"][case]
    assert one["dtypes"] == KEPT[case]
    assert one["changed"] == []
    assert one["changed_in_a_new_policy"] == []
    assert set(one["steps"]) == {7}


def test_a_policy_that_keeps_main_weights_otherwise_is_refused(found: dict[str, Any]) -> None:
    assert "the checkpoint holds main weights as remainders, optimizer.megatron asks for whole" in found["refused"]


def test_remainders_come_back_from_float32_as_they_were() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    saved: dict[int, dict[str, Any]] = {0: {"param": every.float(), "exp_avg": torch.ones(2)}}
    read = as_remainders(saved)
    assert torch.equal(read[0]["param"], every)
    assert read[0]["exp_avg"].dtype == torch.float32
