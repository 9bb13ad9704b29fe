"""FusedAdam against torch's own Adam and AdamW."""

from copy import deepcopy

import pytest
import torch

from grpo_mp.platform.adam import FusedAdam

HYPER = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((5, 3), (7,), (0,))]


def give_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize(("decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_same_as_torch_over_steps(decoupled, reference):
    ours, theirs = parameters(), parameters()
    mine, other = FusedAdam(ours, adam_w_mode=decoupled, **HYPER), reference(theirs, **HYPER)
    for step in range(5):
        for group in (*mine.param_groups, *other.param_groups):
            group["lr"] = 3e-2 / (1 + step)
        for params, optimizer in ((ours, mine), (theirs, other)):
            give_gradients(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_state_lies_where_megatron_looks_for_it():
    params = parameters()
    optimizer = FusedAdam(params, **HYPER)
    give_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}
    assert params[1] not in optimizer.state


def test_a_loaded_optimizer_goes_on_alike():
    params, copies = parameters(), parameters()
    first, second = FusedAdam(params, **HYPER), FusedAdam(copies, **HYPER)
    give_gradients(params, 0)
    first.step()
    second.load_state_dict(deepcopy(first.state_dict()))
    for param, copy in zip(params, copies, strict=True):
        copy.data.copy_(param.data)
    for group, optimizer in ((params, first), (copies, second)):
        give_gradients(group, 1)
        optimizer.step()
    for param, copy in zip(params, copies, strict=True):
        assert torch.equal(param, copy)
