"""What of a precision-aware optimizer moves, and what must not."""

from types import SimpleNamespace
from typing import cast

import torch

from grpo_mp.policy.offload import HostCopies, PolicyOffloader, device_items, move_optimizer
from grpo_mp.policy.policy import Policy


def test_the_state_moves_and_the_parameters_stay_views_of_the_weights() -> None:
    weights = torch.arange(6.0)
    shard = torch.nn.Parameter(weights[2:4])
    optimizer = torch.optim.SGD([shard])
    optimizer.state[shard] = {"exp_avg": torch.ones(2), "step": 3}
    move_optimizer(optimizer, torch.device("meta"), HostCopies(), with_parameters=False)
    assert optimizer.state[shard]["exp_avg"].is_meta
    assert optimizer.state[shard]["step"] == 3
    with torch.no_grad():
        shard.add_(10)
    assert weights.tolist() == [0, 1, 12, 13, 4, 5]


class Device(torch.Tensor):
    """A tensor on the host that says it is on a device, and whose copies to the host are counted."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def test_main_weights_move_too_and_host_memory_is_made_once() -> None:
    copies, host = HostCopies(), torch.device("cpu")
    main, moment = torch.arange(4.0).as_subclass(Device), torch.ones(4).as_subclass(Device)
    first = [copies.move((name, 0), value, host) for name, value in (("parameter", main), ("exp_avg", moment))]
    assert torch.equal(first[0], torch.arange(4.0))
    again = copies.move(("parameter", 0), (main + 1).as_subclass(Device), host)
    assert again.data_ptr() == first[0].data_ptr()
    assert torch.equal(again, torch.arange(4.0) + 1)
    copies.release()
    assert copies.move(("parameter", 0), main, host).data_ptr() != first[0].data_ptr()


def test_the_host_copies_are_given_back_before_a_checkpoint_and_kept_otherwise() -> None:
    policy = SimpleNamespace(
        optimizer=SimpleNamespace(chained_optimizers=[SimpleNamespace()]), chunks=[], parallel=SimpleNamespace(rank=0)
    )
    residency = PolicyOffloader(cast(Policy, policy), limit_s=1.0)
    (copies,) = residency._copies
    kept: list[str] = []
    copies.release = lambda: kept.append("released")  # type: ignore[method-assign]
    residency.optimizer = lambda wake: None  # type: ignore[method-assign]
    for phase in ("train", "save"):
        for part, wake in (("gradients", False), ("optimizer", False)):
            residency.move(part, wake)
        for part in ("gradients", "optimizer") if phase == "train" else ("optimizer",):
            residency.move(part, wake=True)
        assert kept == ([] if phase == "train" else ["released"])


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
