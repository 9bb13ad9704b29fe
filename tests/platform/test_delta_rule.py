"""The gated delta rule by chunks, beside the recurrence (arXiv 2412.06464, eq. 10) in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_mp.platform.delta_rule import CHUNK, delta_rule

N = 3
HEADS = 4
K = 6
V = 5


def recurrence(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    state = value.new_zeros(N, HEADS, V, K)
    outputs = []
    for t in range(value.shape[1]):
        state = state * log_decay[:, t, :, None, None].exp()
        read = torch.einsum("nhvk,nhk->nhv", state, key[:, t])
        state = state + torch.einsum("nhv,nhk->nhvk", (value[:, t] - read) * strength[:, t, :, None], key[:, t])
        outputs.append(torch.einsum("nhvk,nhk->nhv", state, query[:, t]) / K**0.5)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("length", [1, 7, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_outputs_and_gradients(length: int) -> None:
    torch.manual_seed(length)
    heads = (F.normalize(torch.randn(N, length, HEADS, K), dim=-1) for _ in range(2))
    scales = (-torch.rand(N, length, HEADS), torch.rand(N, length, HEADS))
    inputs = [x.requires_grad_() for x in (*heads, torch.randn(N, length, HEADS, V), *scales)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    output = delta_rule(*inputs)
    expected = recurrence(*exact)
    weight = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weight).sum(), inputs)
    pairs = zip(gradients, torch.autograd.grad((expected * weight).sum(), exact), strict=True)
    for actual, wanted in ((output, expected), *pairs):
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=2e-6 * float(wanted.detach().abs().max()))
