"""FusedAdam against torch's own Adam and AdamW."""

import pytest
import torch

from grpo_mp.platform.megatron_patches import FusedAdam

HYPER = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((5, 3), (7,), (0,))]


def set_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize(("decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_steps_equal_torch(decoupled, reference):
    params, expected = parameters(), parameters()
    optimizers = FusedAdam(params, adam_w_mode=decoupled, **HYPER), reference(expected, **HYPER)
    for step in range(5):
        for optimizer in optimizers:
            (group,) = optimizer.param_groups
            group["lr"] = 3e-2 / (1 + step)
            set_gradients(group["params"], step)
            optimizer.step()
    for param, expected_param in zip(params, expected, strict=True):
        torch.testing.assert_close(param, expected_param, rtol=1e-5, atol=1e-6)
