"""What of a precision-aware optimizer moves, and what must not."""

import torch

from grpo_mp.policy.residency import move_state


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
