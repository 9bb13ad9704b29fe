"""Compare an engine's logprobs with the policy's after a weight sync, and name the tensor that differs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "fp8": 0.25}  # mean |engine - policy| in nats; fp8: not yet measured
# The second, larger check: so many sets of sequences, without the farthest tokens. Where rounding decides between two
# experts, policy and engine may route one token differently though all weights are equal; that happens to a token in
# tens of thousands. A wrong tensor is seen by more of them, a rarely chosen expert's included.
RECHECK_SETS = 32
MAX_ROUTING_TIES = 3

EngineChecksums = Mapping[str, str]  # of an engine's tensors, by its own names


@dataclass(frozen=True)
class CheckReport:
    """Hold mean and largest |engine - policy| logprob difference over `tokens` tokens, in nats.

    No tokens: no engine was there to be compared.
    """

    mean: float
    largest: float
    tokens: int

    def passes(self, tolerance: float) -> bool:
        """Tell whether the mean is within the tolerance; False where it is NaN."""
        return self.mean <= tolerance


NOT_COMPARED = CheckReport(0.0, 0.0, 0)


def comparison_sequences(
    vocabulary: int, longest: int, seed: int, prompts: Sequence[tuple[int, ...]] = (), count: int = 4
) -> tuple[tuple[int, ...], ...]:
    """Return sequences to compare on: real prompts of 2 to `longest` tokens, and random tokens."""
    generator = torch.Generator().manual_seed(seed)
    length = max(2, min(longest, 64))
    random = torch.randint(0, vocabulary, (count, length), generator=generator).tolist()
    return (*(prompt for prompt in prompts[:count] if 2 <= len(prompt) <= longest), *map(tuple, random))


def compare(engine: Sequence[Sequence[float]], policy: Sequence[Sequence[float]]) -> CheckReport:
    """Compare logprobs of the same tokens. Raises ValueError where the shapes differ or there is no token."""
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
    """Return the mean over the tokens of several reports without the MAX_ROUTING_TIES farthest, one of a report.

    It is nan where a value is none.
    """
    farthest = sorted(report.largest for report in reports)[-MAX_ROUTING_TIES:]
    total = sum(report.mean * report.tokens for report in reports) - sum(farthest)
    return total / (sum(report.tokens for report in reports) - len(farthest))


def worst_report(reports: Sequence[CheckReport]) -> CheckReport:
    """Return the largest values of several engines' reports on the same tokens, of those that were compared."""
    compared = [report for report in reports if report.tokens] or [NOT_COMPARED]
    return CheckReport(
        max(report.mean for report in compared), max(report.largest for report in compared), compared[0].tokens
    )


def describe_difference(before: EngineChecksums, again: EngineChecksums, restored: EngineChecksums) -> str:
    """Return one sentence that names the tensors at fault after a sync that failed the check.

    before: checksums after that sync; again: after a second one; restored: after the engine's weights were
    overwritten at random and a third one. The second sync changes what the first did not deliver; what differs
    after the third is reached by no sync.
    """
    if changed := [name for name in again if before.get(name) != again[name]]:
        return f"a second sync changed {_first_names(changed)}: the first sync was incomplete"
    if unreached := [name for name in restored if again.get(name) != restored[name]]:
        return f"no sync updates {_first_names(unreached)}"
    return "all tensors arrive unchanged: the engine computes differently, its weights are right"


def describe_repair(before: EngineChecksums, again: EngineChecksums) -> str:
    """Return one sentence on the tensors that sending unchanged weights again changed; "" where it changed none."""
    changed = [name for name in again if before.get(name) != again[name]]
    return f"{len(changed)} of {len(again)} tensors were not the policy's ({_first_names(changed)})" if changed else ""


def _first_names(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
