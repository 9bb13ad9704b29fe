"""Offload of the optimizer, its host buffers, and bytes on the device."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.offload import PolicyOffloader, device_items, move_optimizer
from grpo_mp.policy.policy import Policy
from tests.policy.test_checkpoint import make_policy


@pytest.mark.parametrize("with_parameters", [False, True])
def test_state_is_moved_to_the_same_host_memory_and_back(
    with_parameters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`platform.device` returns the host, so an onload copies nothing."""
    weights, host = torch.arange(6.0), list[torch.Tensor]()
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
    weights, gradients = torch.zeros(100), torch.zeros(50)
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
