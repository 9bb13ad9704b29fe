"""`optimizer.offload=host`: TransformerEngine's own Adam, with formulas for its kernels, on pieces and on all state."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.platform.pinned import aligned_bytes
from grpo_mp.policy.adam_state import divide
from tests.policy.te_stub import te_wheel
from tools.tiny.models import make_tiny, make_tokenizer

ROOT = Path(__file__).parents[2]
BYTES_PER_PARAMETER = {
    "remainders": 6,
    "plain": 12,
    "float32 moments": 10,
    "one bfloat16 moment": 8,
    "whole main weights": 8,
}


@given(
    st.lists(st.integers(0, 20_000), max_size=8),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
    st.data(),
)
def test_pieces_cover_every_element_once_and_fit(sizes: list[int], dtypes: list[int], data: st.DataObject) -> None:
    piece_bytes = data.draw(st.integers(512 * sum(dtypes), 100_000))
    pieces = divide(sizes, sum(dtypes), piece_bytes)
    ranges = [part for piece in pieces for part in piece]
    assert [(index, element) for index, start, stop in ranges for element in range(start, stop)] == [
        (index, element) for index, size in enumerate(sizes) for element in range(size)
    ]
    for piece in pieces:
        state = [(stop - start) * size for _, start, stop in piece for size in dtypes]
        assert 0 < sum(aligned_bytes(torch.empty(size, dtype=torch.uint8)) for size in state) <= piece_bytes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny(folder / "model", "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "tests.policy.host_state_on_ranks", str(te_wheel()), str(folder / "model"), str(folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", BYTES_PER_PARAMETER)
def test_an_update_in_pieces_equals_that_of_all_state(case: str, ranks: list[dict[str, Any]]) -> None:
    """Of several sizes, also after a resume from, and of, a run whose state is on the device."""
    for rank in ranks:
        result = rank[case]
        assert result["bytes per parameter"] == BYTES_PER_PARAMETER[case]
        for tensors, others in result["bytes stored"]:  # bfloat16 weights and the state; experts' biases have none
            assert abs(tensors - 2 - BYTES_PER_PARAMETER[case]) < 0.01
            assert others < 1.5  # headers: 1 kB a tensor, of few parameters here
        pieces = result["pieces"]
        assert pieces["host, small"] > pieces["host"] > pieces["host, one piece"]
        for when in ("initial", "updated", "resumed", "updated again"):
            assert not any(result[when].values()), (when, result[when])
        assert result["steps"] == [4]
        assert result["unchanged"] == []


@pytest.mark.slow
def test_other_main_weight_format_is_an_error(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "holds main weights as remainders, training.megatron_args asks for whole" in rank["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("expert", [1, 2])
def test_remainders_of_one_layout_are_loaded_in_another_bit_for_bit(expert: int, ranks: list[dict[str, Any]]) -> None:
    """Saved where two ranks divide the experts and loaded where each has all of them, and the other way."""
    results = [rank[f"for expert={expert}"] for rank in ranks]
    for result in results:
        assert result["different"] == []
        kinds = ["exp_avg torch.bfloat16", "exp_avg_sq torch.bfloat16", "main_param torch.int16"]
        assert [kind for kind in result["kinds"] if not kind.startswith("weight")] == kinds
        assert "weight torch.bfloat16" in result["kinds"]
        assert result["experts"] > 0
