"""Chunked logprobs and entropies against log_softmax in float64; and what memory they take."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_mp.policy.vocab_parallel import VocabularyShard, token_logprobs
from tests.policy.head_rounding import bounds


@dataclass(frozen=True)
class Case:
    """hidden [T, H], weight [padded vocabulary, H], targets [T], cotangent [2, T]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    cotangent: Tensor


def draw(tokens: int, hidden: int, vocabulary: int, padding: int, seed: int = 0, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return Case(scale * normal(tokens, hidden), normal(vocabulary + padding, hidden), targets, normal(2, tokens))


def chunked(case: Case, vocabulary: int, temperature: float, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of hidden, gradient of weight."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    out = token_logprobs(hidden, weight, case.targets, VocabularyShard(0, vocabulary, None), temperature, chunk)
    return (out.detach(), *torch.autograd.grad(out, (hidden, weight), case.cotangent))


def whole(case: Case, vocabulary: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64, without chunks."""
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=hidden @ weight[:vocabulary].t() / temperature)
    out = torch.stack([distribution.log_prob(case.targets), distribution.entropy()])
    return (out.detach(), *torch.autograd.grad(out, (hidden, weight), case.cotangent.double()))


def check(case: Case, vocabulary: int, temperature: float, chunk: int) -> None:
    found, expected = chunked(case, vocabulary, temperature, chunk), whole(case, vocabulary, temperature)
    limits = bounds(
        case.hidden.double(), case.weight[:vocabulary].double(), case.cotangent.double(), case.targets, temperature
    )
    for one, other, limit in zip(found, expected, limits, strict=True):
        assert one.dtype == torch.float32
        real = slice(len(limit))  # beyond is the gradient of padding: none at all
        assert bool(((one - other).abs()[real] <= limit).all())
        assert not one[real.stop :].any()


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 21))
@settings(max_examples=60)
def test_equal_to_log_softmax(tokens: int, vocabulary: int, padding: int, temperature: float, chunk: int) -> None:
    check(draw(tokens, 6, vocabulary, padding, seed=tokens), vocabulary, temperature, chunk)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("padding", [0, 3])
def test_each_cotangent_alone(row: int, size: float, padding: int) -> None:
    case = draw(11, 6, 17, padding)
    case.cotangent[row] *= size
    case.cotangent[1 - row] = 0.0
    check(case, 17, 0.7, 4)


def test_peaked_distributions_stay_finite() -> None:
    case = draw(9, 4, 13, 3, scale=200.0)
    found, expected = chunked(case, 13, 0.5, 2), whole(case, 13, 0.5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)


def test_padding_columns_change_nothing_and_get_no_gradient() -> None:
    case = draw(10, 6, 16, 4)
    case.weight[16:] = 1e3
    padded = chunked(case, 16, 1.0, 3)
    plain = chunked(Case(case.hidden, case.weight[:16], case.targets, case.cotangent), 16, 1.0, 3)
    torch.testing.assert_close(padded[0], plain[0])
    torch.testing.assert_close(padded[1], plain[1])
    assert torch.equal(padded[2][16:], torch.zeros(4, 6))


def test_half_precision_weights_give_float32_logprobs_and_half_precision_gradients() -> None:
    case = draw(12, 8, 20, 0)
    half = Case(case.hidden.bfloat16(), case.weight.bfloat16(), case.targets, case.cotangent)
    found, expected = chunked(half, 20, 1.0, 5), whole(half, 20, 1.0)
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= 0.01 * float(other.norm())


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation made or read."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_no_tensor_is_larger_than_a_chunk_of_logits(chunk: int) -> None:
    tokens, vocabulary = 128, 640
    case = draw(tokens, 1, vocabulary, 0)
    with Largest() as largest:
        chunked(case, vocabulary, 1.0, chunk)
    assert largest.elements == chunk * vocabulary
    with Largest() as plain:
        whole(case, vocabulary, 1.0)
    assert plain.elements == tokens * vocabulary
