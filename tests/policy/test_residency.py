"""What of a precision-aware optimizer moves, and what must not."""

from types import SimpleNamespace
from typing import cast

import torch

from grpo_mp.policy.policy import Policy
from grpo_mp.policy.residency import device_items, move_state


def test_the_state_moves_and_the_parameters_stay_views_of_the_weights() -> None:
    weights = torch.arange(6.0)
    shard = torch.nn.Parameter(weights[2:4])
    optimizer = torch.optim.SGD([shard])
    optimizer.state[shard] = {"exp_avg": torch.ones(2), "step": 3}
    move_state(optimizer, torch.device("meta"))
    assert optimizer.state[shard]["exp_avg"].is_meta
    assert optimizer.state[shard]["step"] == 3
    with torch.no_grad():
        shard.add_(10)
    assert weights.tolist() == [0, 1, 12, 13, 4, 5]


def test_what_fills_the_device_counts_shared_memory_once() -> None:
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
