"""Compare an engine's logprobs with the policy's after a weight sync, and name the tensor that differs. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

LEAST_LIMIT = 1e-4  # nats: no smaller mean difference matters to an importance weight, whatever the precision
# The mean difference of engine and policy, in units of what rounding noise changes in the policy's own logprobs on
# the same tokens (policy/rounding.py). With e for the error by all roundings of one computation, two that are
# equally right differ by sqrt(2) e, and so do the policy and itself with noise, which adds one more rounding at each
# linear layer: the quotient is below 1. Of attention by other kernels and of float32 it is 0.65 to 0.84 in models of
# 2 to 32 layers and 64 to 512 columns, and 0.70 and 0.79 in a trained one of 30 layers and 576 columns, where an
# attention scale that is wrong by 10 % is 2.8, and a rope of a tenth of its theta 4.8.
ROUNDING_FACTOR = 1.5  # up to here an engine passes
WRONG_FACTOR = 2.5  # beyond, rounding explains no difference; between them it is said whose rounding it may be
# The second check, of mixtures of experts: so many sets of sequences, without the farthest tokens. Where rounding
# decides between two experts, policy and engine may route one token differently though all weights are equal; in
# float32 that happens to a token in tens of thousands. A wrong tensor is seen by more of them, a rarely chosen
# expert's included.
RECHECK_SETS = 8
MAX_ROUTING_TIES = 3
MIN_TEXTS, MAX_TEXTS, MIN_TOKENS = 4, 32, 256  # prompts of a set: four, or more that are short
ANSWERS, ANSWER_TOKENS = 2, 128  # of the last step, the end of each

EngineChecksums = Mapping[str, str]  # of an engine's tensors, by its own names


@dataclass(frozen=True)
class CheckReport:
    """Mean and largest |engine - policy| logprob difference over `tokens` tokens in nats, and the mean's limit.

    Without tokens no engine was compared.
    """

    mean: float
    largest: float
    tokens: int
    limit: float = 0.0

    def passes(self, tolerance: float) -> bool:
        """Return whether the mean is within the tolerance; False for NaN."""
        return self.mean <= tolerance


NOT_COMPARED = CheckReport(0.0, 0.0, 0)


def comparison_sequences(
    prompts: Sequence[tuple[int, ...]], longest: int, number: int = 0, answers: Sequence[tuple[int, ...]] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return texts of the run, of 2 to `longest` tokens, on which engine and policy are compared.

    Set 0 has the first prompts and the ends of `answers`, prompts with responses. Other sets draw prompts, each from
    a random token on, so that sets of few prompts differ.
    """
    generator = random.Random(number)
    # Where all prompts are of one token, they are one text.
    texts = [prompt for prompt in prompts if len(prompt) >= 2] or [(*chain(*prompts), *prompts[0])]
    if number:
        texts = [text[generator.randrange(len(text) - 1) :] for text in generator.sample(texts, len(texts))]
    chosen, tokens = list[tuple[int, ...]](), 0
    for text in texts[:MAX_TEXTS]:
        if len(chosen) >= MIN_TEXTS and tokens >= MIN_TOKENS:
            break
        chosen.append(text[:longest])
        tokens += len(chosen[-1])
    ends = [answer[-min(ANSWER_TOKENS, longest) :] for answer in answers[:ANSWERS] if len(answer) >= 2]
    return (*chosen, *(ends if not number else ()))


def compare(engine: Sequence[Sequence[float]], policy: Sequence[Sequence[float]]) -> CheckReport:
    """Compare logprobs of the same tokens. Raises ValueError for different shapes or no token."""
    if [len(sequence) for sequence in engine] != [len(sequence) for sequence in policy]:
        raise ValueError("engine and policy scored different numbers of tokens")
    flat = [[value for sequence in side for value in sequence] for side in (engine, policy)]
    if not flat[0]:
        raise ValueError("there is no token to compare engine and policy on")
    difference = torch.tensor(flat, dtype=torch.float64).diff(dim=0).abs()
    return CheckReport(float(difference.mean()), float(difference.max()), difference.numel())


def pool_reports(reports: Sequence[CheckReport]) -> CheckReport:
    """Return one report over the tokens of all reports."""
    tokens = sum(report.tokens for report in reports)
    mean = sum(report.mean * report.tokens for report in reports) / max(1, tokens)
    return CheckReport(mean, max(report.largest for report in reports), tokens)


def trimmed_mean(reports: Sequence[CheckReport]) -> float:
    """Return the mean over the tokens of several reports without the MAX_ROUTING_TIES largest values."""
    farthest = sorted(report.largest for report in reports)[-MAX_ROUTING_TIES:]
    total = sum(report.mean * report.tokens for report in reports) - sum(farthest)
    return total / (sum(report.tokens for report in reports) - len(farthest))


def worst_report(reports: Sequence[CheckReport]) -> CheckReport:
    """Return the largest values of the compared engines' reports on the same tokens."""
    compared = [report for report in reports if report.tokens] or [NOT_COMPARED]
    return CheckReport(
        max(report.mean for report in compared), max(report.largest for report in compared), compared[0].tokens
    )


def describe_difference(before: EngineChecksums, again: EngineChecksums, restored: EngineChecksums) -> str:
    """Return one sentence that names the wrong tensors after a failed check; "" where none is wrong.

    before: checksums after the failed sync; again: after a second sync, which changes tensors that the first one did
    not deliver; restored: after a third sync of randomly overwritten weights, which differs where no sync delivers.
    """
    if not (again and restored):
        return "the engine computes no checksums, so which tensor differs is not known"
    if changed := [name for name in again if before.get(name) != again[name]]:
        return f"a second sync changed {_first_names(changed)}: the first sync was incomplete"
    if unreached := [name for name in restored if again.get(name) != restored[name]]:
        return f"no sync updates {_first_names(unreached)}"
    return ""


def _first_names(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
