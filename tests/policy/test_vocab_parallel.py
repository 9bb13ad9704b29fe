"""Chunked logprobs and entropies against log_softmax in float64, and their memory."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_mp.policy.vocab_parallel import Head, VocabularyShard, token_logprobs, within_kept
from grpo_mp.utils.types import LEAST_LOGPROB, NO_TOKEN

# Bounds of float32 rounding (Higham, Accuracy and Stability of Numerical Algorithms, 2002, ch. 2-4): an operation has
# relative error at most U, exp and log 2 U, a sum of n terms n U of the sum of their absolute values.
U = 2.0**-24
SECOND_ORDER = 1.01  # for the omitted terms of order U^2


@dataclass(frozen=True)
class Case:
    """hidden [T, H], weight [padded vocabulary, H], targets [T], cotangent [2, T]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    cotangent: Tensor


def random_case(tokens: int, hidden: int, vocabulary: int, padding: int, seed: int = 0, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return Case(scale * normal(tokens, hidden), normal(vocabulary + padding, hidden), targets, normal(2, tokens))


def chunked(
    case: Case, vocabulary: int, temperature: float, chunk: int, others: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    shard = VocabularyShard(Head(temperature, chunk, vocabulary))
    out = token_logprobs(hidden, weight, case.targets, shard, others)
    return (out.detach(), *torch.autograd.grad(out, (hidden, weight), case.cotangent))


def reference(case: Case, vocabulary: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden = case.hidden.double().requires_grad_()
    weight = case.weight.double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=hidden @ weight[:vocabulary].t() / temperature)
    out = torch.stack([distribution.log_prob(case.targets), distribution.entropy()])
    return (out.detach(), *torch.autograd.grad(out, (hidden, weight), case.cotangent.double()))


def error_bounds(
    hidden: Tensor, weight: Tensor, cotangent: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds for the output [2, T] and for the gradients of hidden [T, H] and weight [V, H].

    hidden [T, H], weight [V, H] (without padding) and cotangent [2, T] in float64; targets [T].
    """
    tokens = len(hidden)
    width = hidden.shape[1]
    vocabulary = len(weight)
    logits = hidden @ weight.t() / temperature
    magnitudes = hidden.abs() @ weight.abs().t() / temperature
    # A dot product of `width` terms and a division; counted again for the maximum logit.
    d_logit = (width + 1) * U * magnitudes.amax(1, keepdim=True)
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    entropy = -(log_p.exp() * log_p).sum(1, keepdim=True)
    shifted = logits - logits.amax(1, keepdim=True)
    log_sum = -log_p.amax(1, keepdim=True)
    d_shifted = 2 * d_logit + U * shifted.abs()
    d_weight = d_shifted.amax(1, keepdim=True) + 2 * U  # relative, of exp(shifted)
    d_log_sum = d_weight + vocabulary * U + 2 * U * log_sum
    d_log_p = d_shifted + d_log_sum + U * (shifted.abs() + log_p.abs())
    # entropy = log_sum - sum(exp(shifted) * shifted) / sum(exp(shifted)), where the quotient is log_sum - entropy.
    quotient = (p * shifted.abs()).sum(1, keepdim=True)
    d_quotient = quotient * (2 * d_weight + (2 * vocabulary + 2) * U) + (p * d_shifted).sum(1, keepdim=True)
    d_entropy = d_log_sum + d_quotient + U * entropy
    picked = torch.zeros_like(logits).scatter(1, targets[:, None], 1.0)
    output = torch.stack([(picked * d_log_p).sum(1), d_entropy[:, 0]])
    # d logit = onehot * g0 - p * (g0 + g1 * (log_p + entropy)), divided by the temperature.
    g0, g1 = (row.abs()[:, None] for row in cotangent)
    slope = g0 + g1 * (log_p + entropy).abs()
    d_slope = g1 * (d_log_p + d_entropy + 2 * U * (log_p + entropy).abs()) + U * slope
    magnitude = (p * slope + g0 * picked) / temperature
    d_magnitude = (p * (d_slope + slope * (d_log_p + 4 * U)) + 2 * U * g0 * picked) / temperature + 2 * U * magnitude
    grad_hidden = d_magnitude @ weight.abs() + vocabulary * U * (magnitude @ weight.abs())
    grad_weight = d_magnitude.t() @ hidden.abs() + (tokens + 1) * U * (magnitude.t() @ hidden.abs())
    return SECOND_ORDER * output, SECOND_ORDER * grad_hidden, SECOND_ORDER * grad_weight


def check(case: Case, vocabulary: int, temperature: float, chunk: int) -> None:
    actual = chunked(case, vocabulary, temperature, chunk)
    expected = reference(case, vocabulary, temperature)
    bounds = error_bounds(
        case.hidden.double(), case.weight[:vocabulary].double(), case.cotangent.double(), case.targets, temperature
    )
    for tensor, expected_tensor, bound in zip(actual, expected, bounds, strict=True):
        assert tensor.dtype == torch.float32
        unpadded = len(bound)
        assert bool(((tensor - expected_tensor).abs()[:unpadded] <= bound).all())
        assert not tensor[unpadded:].any()  # the gradient of padding is 0


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 21))
@settings(max_examples=60)
def test_equals_log_softmax(tokens: int, vocabulary: int, padding: int, temperature: float, chunk: int) -> None:
    check(random_case(tokens, 6, vocabulary, padding, seed=tokens), vocabulary, temperature, chunk)


@pytest.mark.parametrize("row", [0, 1])
def test_each_cotangent(row: int) -> None:
    case = random_case(11, 6, 17, 3)
    case.cotangent[row] *= 50.0
    case.cotangent[1 - row] = 0.0
    check(case, 17, 0.7, 4)


def test_peaked_distributions_stay_finite() -> None:
    case = random_case(9, 4, 13, 3, scale=200.0)
    actual = chunked(case, 13, 0.5, 2)
    expected = reference(case, 13, 0.5)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor.double(), expected_tensor, rtol=1e-4, atol=1e-3)


def peaked_case(top: float, vocabulary: int = 256, tokens: int = 64) -> Case:
    case = random_case(tokens, 64, vocabulary, 0)
    largest = (case.hidden @ case.weight.t()).amax(1, keepdim=True)
    hidden = (case.hidden * top / largest).bfloat16()
    weight = case.weight.bfloat16()
    return Case(hidden, weight, (hidden.double() @ weight.double().t()).topk(2).indices[:, 1], case.cotangent)


def test_a_float32_head_does_not_round_logits() -> None:
    """Around 20 bfloat16 has steps of 1/8. Both heads have the same operands."""
    case = peaked_case(top=20.0)
    exact = reference(case, 256, 1.0)[0][0]

    def error(fp32_head: bool) -> float:
        shard = VocabularyShard(Head(1.0, 16, 256, fp32_head))
        out = token_logprobs(case.hidden, case.weight, case.targets, shard)
        return float((out[0] - exact).abs().mean())

    assert error(fp32_head=False) > 0.01
    assert error(fp32_head=True) < 1e-5


def test_gradients_of_a_float32_head_against_float64() -> None:
    """Each is rounded to bfloat16, 2^-9 of it, twice: of the logits, and of the operands."""
    case = peaked_case(top=20.0)
    actual = chunked(case, 256, 1.0, 16)
    expected = reference(case, 256, 1.0)
    for tensor, expected_tensor in zip(actual[1:], expected[1:], strict=True):
        assert tensor.dtype == torch.bfloat16
        assert float((tensor - expected_tensor).norm()) <= 0.004 * float(expected_tensor.norm())


@pytest.mark.parametrize("tied", ["", "zero_out_wgrad", "shared_embedding"])
def test_the_output_layers_gradient_is_summed_where_megatron_sums_it(tied: str) -> None:
    """Megatron's hook adds the returned gradient unless `grad_added_to_main_grad`, or for a tied weight."""
    case = peaked_case(top=20.0)
    weight = torch.nn.Parameter(case.weight.clone())
    earlier = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7))
    setattr(weight, tied or "main_grad", True)
    weight.main_grad = earlier.clone()
    weight.grad_added_to_main_grad = False
    out = token_logprobs(case.hidden, weight, case.targets, VocabularyShard(Head(1.0, 16, 256)))
    returned = torch.autograd.grad(out, weight, case.cotangent)[0]
    assert returned.shape == weight.shape
    assert weight.grad_added_to_main_grad == (not tied)
    total = weight.main_grad + returned if tied else weight.main_grad
    gradient = chunked(case, 256, 1.0, 16)[2].float()
    torch.testing.assert_close(total, earlier + gradient, rtol=0, atol=2**-8 * float(gradient.abs().max()))
    assert torch.equal(weight.main_grad, earlier) == bool(tied)


def others_of(case: Case, vocabulary: int, count: int) -> Tensor:
    """[T, count] the most likely tokens of each row, some of which the vocabulary does not have."""
    others = (case.hidden @ case.weight[:vocabulary].t()).topk(count).indices.int()
    others[::3, -1] = -1
    return others


@pytest.mark.parametrize("chunk", [3, 20])
@pytest.mark.parametrize(("scale", "count"), [(1.0, 4), (1.0, 12), (6.0, 8)])
def test_other_tokens_and_all_the_rest_against_log_softmax(scale: float, count: int, chunk: int) -> None:
    """With a scale of 6 nearly all probability is often in few tokens, and the rest far below rounding error of 1."""
    vocabulary = 13
    padding = 2
    temperature = 0.7
    case = random_case(11, 6, vocabulary, padding, scale=scale)
    case = replace(case, cotangent=torch.randn(3 + count, 11, generator=torch.Generator().manual_seed(6)))
    others = others_of(case, vocabulary, count)
    found = chunked(case, vocabulary, temperature, chunk, others)

    exact_hidden = case.hidden.double().requires_grad_()
    exact_weight = case.weight.double().requires_grad_()
    logits = exact_hidden @ exact_weight[:vocabulary].t() / temperature
    logprobs = logits.log_softmax(-1)
    picked = logprobs.gather(1, others.clamp(min=0).long()).where(others >= 0, LEAST_LOGPROB)
    is_rest = torch.ones_like(logprobs, dtype=torch.bool)
    for row, own in zip(is_rest, others.tolist(), strict=True):
        row[[token for token in own if token >= 0]] = False
    rest = logprobs.masked_fill(~is_rest, -torch.inf).logsumexp(1)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    own = logprobs.gather(1, case.targets[:, None])[:, 0]
    expected = torch.cat([torch.stack([own, entropy]), picked.clamp(min=LEAST_LOGPROB).t(), rest[None]])
    assert rest.min() > -80  # exp() of it is no subnormal number of float32
    gradients = torch.autograd.grad(expected, (exact_hidden, exact_weight), case.cotangent.double())
    for tensor, expected_tensor in zip(found, (expected.detach(), *gradients), strict=True):
        torch.testing.assert_close(tensor.double(), expected_tensor, rtol=2e-4, atol=2e-4 * scale)
    assert found[0][-1].min() < (-20 if scale > 1 else 0)
    assert not found[2][vocabulary:].any()


def test_logprobs_over_kept_tokens_against_a_masked_log_softmax() -> None:
    """The kept tokens of each row with its target, from 1 to all 13 of them; a row of padding keeps all."""
    vocabulary = 13
    padding = 2
    temperature = 0.7
    case = random_case(14, 6, vocabulary, padding, scale=2.0)
    generator = torch.Generator().manual_seed(3)
    kept = torch.full((14, vocabulary), NO_TOKEN, dtype=torch.int32)
    for row in range(1, 14):
        others = torch.randperm(vocabulary, generator=generator)
        chosen = [int(case.targets[row]), *others[others != case.targets[row]][: row - 1].tolist()]
        kept[row, :row] = torch.tensor(chosen)[torch.randperm(row, generator=generator)]
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    shard = VocabularyShard(Head(temperature, 5, vocabulary))
    found, log_mass = within_kept(token_logprobs(hidden, weight, case.targets, shard, kept), kept)
    gradients = torch.autograd.grad(found, (hidden, weight), case.cotangent)

    exact_hidden = case.hidden.double().requires_grad_()
    exact_weight = case.weight.double().requires_grad_()
    logits = exact_hidden @ exact_weight[:vocabulary].t() / temperature
    mask = torch.tensor([[not row or token in kept[row].tolist() for token in range(vocabulary)] for row in range(14)])
    logprobs = logits.masked_fill(~mask, -1e6).log_softmax(-1)
    own = logprobs.gather(1, case.targets[:, None])[:, 0]
    expected = torch.stack([own, -(logprobs.exp() * logprobs).sum(1)])
    exact = torch.autograd.grad(expected, (exact_hidden, exact_weight), case.cotangent.double())
    for tensor, expected_tensor in zip((found.detach(), *gradients), (expected.detach(), *exact), strict=True):
        torch.testing.assert_close(tensor.double(), expected_tensor, rtol=2e-5, atol=2e-5)
    mass = (logits.softmax(-1) * mask).sum(1)
    torch.testing.assert_close(log_mass.double().exp(), mass.detach(), rtol=0, atol=1e-6)
    with_squares = VocabularyShard(Head(temperature, 5, vocabulary, with_squares=True))
    for others, exact_p in ((None, logits.softmax(-1)), (kept, logprobs.exp())):
        output = token_logprobs(case.hidden, case.weight, case.targets, with_squares, others)
        rows = output if others is None else within_kept(output, others, with_squares=True)[0]
        assert rows.shape == (3, 14)
        torch.testing.assert_close(rows[2].double(), exact_p.detach().square().sum(1), rtol=1e-5, atol=0)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation read or returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize("count", [None, 3])
def test_no_tensor_is_larger_than_a_chunk_of_logits(count: int | None) -> None:
    tokens = 128
    vocabulary = 640
    chunk = 16
    case = random_case(tokens, 1, vocabulary, 0)
    others = None if count is None else others_of(case, vocabulary, count)
    case_of_count = replace(case, cotangent=torch.ones(2 if count is None else 3 + count, tokens))
    with LargestTensor() as chunked_largest:
        chunked(case_of_count, vocabulary, 1.0, chunk, others)
    assert chunked_largest.elements == chunk * vocabulary
    with LargestTensor() as reference_largest:
        reference(case, vocabulary, 1.0)
    assert reference_largest.elements == tokens * vocabulary
