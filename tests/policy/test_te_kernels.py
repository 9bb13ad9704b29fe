"""The formulas that stand for TransformerEngine's kernels, against torch's AdamW."""

import pytest
import torch

from tests.policy.te_kernels import adam, adam_param_remainder

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.98), 1e-8, 0.1
NOOP = torch.zeros(1)


@pytest.mark.parametrize("kernel", [adam, adam_param_remainder])
def test_updates_are_those_of_adamw(kernel: type) -> None:
    """A bfloat16 weight is the main weight, rounded; with remainders both together are the main weight to the bit."""
    start = torch.randn(1000).bfloat16()
    expected = torch.nn.Parameter(start.float())
    reference = torch.optim.AdamW([expected], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    param, exp_avg, exp_avg_sq = start.clone(), torch.zeros(1000), torch.zeros(1000)
    main = start.float() if kernel is adam else torch.zeros(1000, dtype=torch.int16)
    for step in range(1, 6):
        gradient = torch.randn(1000)
        expected.grad = gradient
        reference.step()
        lists = [[gradient], [param], [exp_avg], [exp_avg_sq], [main]]
        kernel(0, NOOP, lists, LR, *BETAS, EPS, step, 1, 1, DECAY)
        assert torch.allclose(_main_weight(param, main), expected, rtol=1e-6, atol=1e-6)
        assert torch.allclose(param.float(), expected, rtol=2**-8)
    assert not torch.equal(param, start)


def _main_weight(param: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    if main.dtype == torch.float32:
        return main
    rounded_up = (main < 0).int()
    return (((param.view(torch.int16).int() - rounded_up) << 16) + (main.int() & 0xFFFF)).view(torch.float32)
