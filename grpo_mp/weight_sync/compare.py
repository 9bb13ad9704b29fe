"""Comparison of an engine's logprobs with the policy's after a weight sync."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

LEAST_LIMIT = 1e-4  # nats; in any precision, a smaller mean difference does not matter to importance weights
# The factors are multiples of the mean effect of rounding noise on the policy's own logprobs on the same tokens
# (policy/rounding.py). Measured quotients of correct engines: 0.65 to 0.84 in models of 2 to 32 layers. In a trained
# model of 30 layers an attention scale that is wrong by 10 % gives 2.8, and a rope theta ten times too small 4.8.
ROUNDING_FACTOR = 1.5  # up to this factor an engine passes
WRONG_FACTOR = 2.5  # above this factor rounding cannot explain the difference; in between, a warning names its origin
# Second check of MoE models, on several sets of sequences without the tokens that differ most: if rounding decides
# between two experts, policy and engine may route a token differently although all weights are equal.
RECHECK_SETS = 8
MAX_ROUTING_TIES = 3
# limits of a set: at least 4 prompts, more if they are short
MIN_TEXTS = 4
MAX_TEXTS = 32
MIN_TOKENS = 256
DECODED_TOKENS = 16  # that an engine generates after each text


@dataclass(frozen=True)
class CheckReport:
    """Mean and largest |logprob difference| of engine and policy over `tokens` tokens [nats], and the mean's limit.

    `decoding`: the mean, if the report compares an engine's decoding with its own prefill; otherwise 0.
    `tokens` is 0 if no engine was compared.
    """

    mean: float
    largest: float
    tokens: int
    decoding: float = 0.0
    limit: float = 0.0

    def passes(self, tolerance: float) -> bool:
        """Return whether the mean is at most `tolerance`; False for NaN."""
        return self.mean <= tolerance


NOT_COMPARED = CheckReport(0.0, 0.0, 0)


def comparison_sequences(
    prompts: Sequence[tuple[int, ...]], longest: int, number: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences, of 2 to `longest` tokens, on which engine and policy are compared.

    `number`: number of the set. Set 0 consists of the first prompts, other sets of random prompts, each from a random
    token on, so that the sets differ if there are few prompts.
    """
    generator = random.Random(number)
    # If all prompts have a single token, join them to one text.
    texts = [prompt for prompt in prompts if len(prompt) >= 2] or [(*chain(*prompts), *prompts[0])]
    if number:
        texts = [text[generator.randrange(len(text) - 1) :] for text in generator.sample(texts, len(texts))]
    chosen = list[tuple[int, ...]]()
    tokens = 0
    for text in texts[:MAX_TEXTS]:
        if len(chosen) >= MIN_TEXTS and tokens >= MIN_TOKENS:
            break
        chosen.append(text[:longest])
        tokens += len(chosen[-1])
    return tuple(chosen)


def compare(engine: Sequence[Sequence[float]], policy: Sequence[Sequence[float]]) -> CheckReport:
    """Return the report on two computations of the same tokens' logprobs. Raises ValueError for different shapes."""
    if [len(sequence) for sequence in engine] != [len(sequence) for sequence in policy]:
        raise ValueError("engine and policy scored different numbers of tokens")
    flat = [[value for sequence in side for value in sequence] for side in (engine, policy)]
    if not flat[0]:
        raise ValueError("there is no token to compare engine and policy on")
    difference = torch.tensor(flat, dtype=torch.float64).diff(dim=0).abs()
    return CheckReport(float(difference.mean()), float(difference.max()), difference.numel())


def pool_reports(reports: Sequence[CheckReport]) -> CheckReport:
    """Combine reports on different tokens into one report over all tokens."""
    tokens = sum(report.tokens for report in reports)
    mean = sum(report.mean * report.tokens for report in reports) / max(1, tokens)
    decoding = max(report.decoding for report in reports)
    return CheckReport(mean, max(report.largest for report in reports), tokens, decoding)


def trimmed_mean(reports: Sequence[CheckReport]) -> float:
    """Return the mean difference over all tokens of the reports, without the MAX_ROUTING_TIES largest differences.

    At most one token, the one that differs most, is removed from each report.
    """
    farthest = sorted(report.largest for report in reports)[-MAX_ROUTING_TIES:]
    total = sum(report.mean * report.tokens for report in reports) - sum(farthest)
    return total / (sum(report.tokens for report in reports) - len(farthest))


def worst_report(reports: Sequence[CheckReport]) -> CheckReport:
    """Return the maximum of each value over the engines' reports on the same tokens; NOT_COMPARED without engines."""
    compared = [report for report in reports if report.tokens] or [NOT_COMPARED]
    return CheckReport(
        max(report.mean for report in compared), max(report.largest for report in compared), compared[0].tokens
    )
