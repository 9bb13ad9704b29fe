"""Offload of the optimizer, its host buffers, and bytes on the device."""

from types import SimpleNamespace
from typing import cast

import torch

from grpo_mp.policy.offload import HostBuffers, device_items, move_optimizer
from grpo_mp.policy.policy import Policy


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
    buffers, host = HostBuffers(), torch.device("cpu")
    main, moment = torch.arange(4.0).as_subclass(Device), torch.ones(4).as_subclass(Device)
    offloaded = [buffers.move((name, 0), value, host) for name, value in (("parameter", main), ("exp_avg", moment))]
    assert torch.equal(offloaded[0], torch.arange(4.0))
    again = buffers.move(("parameter", 0), (main + 1).as_subclass(Device), host)
    assert again.data_ptr() == offloaded[0].data_ptr()
    assert torch.equal(again, torch.arange(4.0) + 1)


def test_device_items_count_shared_storage_once() -> None:
    weights, gradients = torch.zeros(100), torch.zeros(50)
    adam = torch.optim.SGD([torch.nn.Parameter(weights[10:20])])
    adam.state[adam.param_groups[0]["params"][0]] = {"exp_avg": torch.zeros(10), "exp_avg_sq": torch.zeros(10)}
    chunk = SimpleNamespace(
        buffers=[SimpleNamespace(param_data=weights, grad_data=gradients)],
        expert_parallel_buffers=[SimpleNamespace(param_data=None, grad_data=torch.zeros(5))],
    )
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)])
    items = device_items(cast(Policy, SimpleNamespace(chunks=[chunk], optimizer=optimizer)))
    assert (items["weights"], items["gradients"], items["optimizer"]) == (400, 220, 80)
