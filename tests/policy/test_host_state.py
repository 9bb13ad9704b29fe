"""`optimizer.offload=host`: TransformerEngine's own Adam, with formulas for its kernels, on pieces and on all state.

Offload of the optimizer, its host buffers, and bytes on the device.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.platform.pinned import aligned_bytes
from grpo_mp.policy.adam_state import divide
from grpo_mp.policy.offload import PolicyOffloader, device_items, move_optimizer
from grpo_mp.policy.policy import Policy
from tests.policy.te_stub import te_wheel
from tests.policy.test_checkpoint import make_policy
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


@pytest.mark.parametrize("with_parameters", [False, True])
def test_state_is_moved_to_the_same_host_memory_and_back(
    with_parameters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`platform.device` returns the host, so an onload copies nothing."""
    weights = torch.arange(6.0)
    host = list[torch.Tensor]()
    shard = torch.nn.Parameter(weights[2:4])
    adam = torch.optim.SGD([shard])
    state = adam.state[shard] = {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}
    for number in range(2):
        state["exp_avg"].data = torch.full((2,), float(number))
        move_optimizer(adam, False, host, with_parameters)
        assert len(host) == 1 + with_parameters
        assert state["exp_avg"].data_ptr() == host[-1].data_ptr()
        assert state["exp_avg"].tolist() == [number] * 2
        assert shard.tolist() == [2, 3]
        move_optimizer(adam, True, host, with_parameters)
    assert state["step"] == 3
    with torch.no_grad():
        shard.add_(10)
    assert weights.tolist() == ([0, 1, 2, 3, 4, 5] if with_parameters else [0, 1, 12, 13, 4, 5])


def test_device_items_count_shared_storage_once() -> None:
    weights = torch.zeros(100)
    gradients = torch.zeros(50)
    adam = torch.optim.SGD([torch.nn.Parameter(weights[10:20])])
    adam.state[adam.param_groups[0]["params"][0]] = {"exp_avg": torch.zeros(10), "exp_avg_sq": torch.zeros(10)}
    chunk = SimpleNamespace(
        buffers=[SimpleNamespace(param_data=weights, grad_data=gradients)],
        expert_parallel_buffers=[SimpleNamespace(param_data=None, grad_data=torch.zeros(5))],
    )
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)])
    items = device_items(cast(Policy, SimpleNamespace(chunks=[chunk], optimizer=optimizer, tensors={}, lora=None)))
    assert (items["weights"], items["gradients"], items["optimizer"]) == (400, 220, 80)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_weights_are_moved_to_our_buffer_and_back(
    lora: dict[str, float] | None, parallel: Parallel, tmp_path: Path
) -> None:
    policy = make_policy(tmp_path, parallel, lora)
    offloader = PolicyOffloader(policy, 1.0)
    before = {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}
    buffers = [buffer for chunk in policy.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    places = [buffer.param_data_cpu.data_ptr() for buffer in buffers]
    for _ in range(2):
        offloader.weights(onload=False)
        frozen = [tensor for name, tensor in policy.tensors.items() if name not in policy.trained_tensors]
        assert all(tensor.untyped_storage().size() == 0 for tensor in [*frozen, *(b.param_data for b in buffers)])
        offloader.weights(onload=True)
        assert all(torch.equal(tensor, before[name]) for name, tensor in policy.tensors.items())
    assert [buffer.param_data_cpu.data_ptr() for buffer in buffers] == places
