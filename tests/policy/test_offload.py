"""Offload of the optimizer, its host buffers, and bytes on the device."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.offload import FrozenWeights, HostBuffers, PolicyOffloader, device_items, move_optimizer
from grpo_mp.policy.policy import Policy
from tests.policy.test_checkpoint import make_policy


def test_state_is_moved_and_parameters_stay_views_of_the_weights() -> None:
    weights = torch.arange(6.0)
    shard = torch.nn.Parameter(weights[2:4])
    optimizer = torch.optim.SGD([shard])
    optimizer.state[shard] = {"exp_avg": torch.ones(2), "step": 3}
    move_optimizer(optimizer, torch.device("meta"), HostBuffers(), with_parameters=False)
    assert optimizer.state[shard]["exp_avg"].is_meta
    assert optimizer.state[shard]["step"] == 3
    with torch.no_grad():
        shard.add_(10)
    assert weights.tolist() == [0, 1, 12, 13, 4, 5]


class Device(torch.Tensor):
    """A host tensor that claims to be on a device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def test_main_weights_are_moved_and_host_buffers_reused() -> None:
    main, buffers = torch.nn.Parameter(torch.arange(4.0).as_subclass(Device)), HostBuffers()
    adam = torch.optim.SGD([main])
    places = []
    for number in range(2):
        main.data = (torch.arange(4.0) + number).as_subclass(Device)
        adam.state[main] = {"exp_avg": (torch.ones(4) * number).as_subclass(Device), "step": torch.tensor(3.0)}
        move_optimizer(adam, torch.device("cpu"), buffers, with_parameters=True)
        assert type(adam.state[main]["exp_avg"]) is torch.Tensor
        assert main.tolist() == [number, number + 1, number + 2, number + 3]
        assert adam.state[main]["exp_avg"].tolist() == [number] * 4
        assert adam.state[main]["step"] == 3
        places.append((main.data_ptr(), adam.state[main]["exp_avg"].data_ptr()))
    assert places[0] == places[1]


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


def test_megatron_moves_weights_to_our_buffer_and_back(parallel: Parallel, tmp_path: Path) -> None:
    policy = make_policy(tmp_path, parallel)
    offloader = PolicyOffloader(policy, 1.0)
    before = {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}
    buffers = [buffer for chunk in policy.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    places = [buffer.param_data_cpu.data_ptr() for buffer in buffers]
    for _ in range(2):
        offloader.weights(onload=False)
        assert all(buffer.param_data.untyped_storage().size() == 0 for buffer in buffers)
        offloader.weights(onload=True)
        assert all(torch.equal(tensor, before[name]) for name, tensor in policy.tensors.items())
    assert [buffer.param_data_cpu.data_ptr() for buffer in buffers] == places


def test_frozen_weights_come_back_from_their_copy() -> None:
    weight = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
    frozen = FrozenWeights([weight])
    for _ in range(2):
        frozen.move(onload=False)
        assert weight.untyped_storage().size() == 0
        frozen.move(onload=True)
        assert weight.tolist() == [0, 1, 2, 3]
