"""Checkpoints of TransformerEngine's Adam, with its own Python code; its kernels are not called."""

import subprocess
import sys
from typing import Any

import pytest

from tests.policy.te_stub import last_json_line, te_wheel

STATE_DTYPES = {
    "plain": {"exp_avg": "torch.float32", "exp_avg_sq": "torch.float32", "main": "torch.float32"},
    "remainders": {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16", "master_param": "torch.int16"},
    "whole": {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16", "master_param": "torch.float32"},
    "float32 moments": {"exp_avg": "torch.float32", "exp_avg_sq": "torch.float32", "master_param": "torch.int16"},
}


@pytest.fixture(scope="module")
def round_trips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("round_trip")
    command = [sys.executable, "-m", "tests.policy.te_round_trip", str(te_wheel()), str(folder)]
    return last_json_line(subprocess.run(command, capture_output=True, text=True, timeout=300))


@pytest.mark.slow
@pytest.mark.parametrize("case", STATE_DTYPES)
def test_state_has_the_configured_dtypes_and_is_restored_exactly(case: str, round_trips: dict[str, Any]) -> None:
    result = round_trips["cases"][case]
    assert result["dtypes"] == STATE_DTYPES[case]
    assert result["changed"] == []
    assert result["changed_in_a_new_policy"] == []
    assert set(result["steps"]) == {7}


@pytest.mark.slow
def test_other_main_weight_format_is_an_error(round_trips: dict[str, Any]) -> None:
    assert (
        "the checkpoint holds main weights as remainders, training.megatron_args asks for whole"
        in round_trips["refused"]
    )
