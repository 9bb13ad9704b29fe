"""The score of one eval set, made of its samples. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from grpo_mp.evaluation.pass_at_k import Estimate, k_values, maj_at_k, mean_over_problems, pass_at_k
from grpo_mp.types import SampleInfo

Votes = Mapping[tuple[int, int], int | None]  # sample -> number of its answer, unique in its problem; None: no answer


@dataclass(frozen=True)
class EvalScore:
    """The score of one eval set; all problems count alike."""

    accuracy: float | None  # avg@n: mean over problems of the share of right samples; None: nothing says what is right
    reward: float
    length: float  # tokens
    accuracy_error: float | None = None  # standard error over problems
    truncated_ratio: float = 0.0
    problems: int = 0
    samples: int = 1  # of each problem
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)  # by k; empty for one sample
    maj_at: Mapping[int, Estimate] = field(default_factory=dict)


def score(infos: Sequence[SampleInfo], votes: Votes | None = None) -> EvalScore:
    """Score the samples of a set, at least one; `votes` for maj@k.

    Samples without a judgement (`right` is None) count in reward, length and truncated_ratio only.
    """
    problems = defaultdict[int, list[SampleInfo]](list)
    for info in infos:
        problems[info.group_id].append(info)
    judged = [[info for info in problem if info.right is not None] for problem in problems.values()]
    judged = [problem for problem in judged if problem]
    shares = [fmean(bool(info.right) for info in problem) for problem in judged]
    accuracy = mean_over_problems(shares) if shares else None
    samples = max(map(len, problems.values()))
    has_pass_at = samples > 1 and accuracy is not None
    return EvalScore(
        accuracy=accuracy.value if accuracy else None,
        accuracy_error=accuracy.error if accuracy else None,
        reward=fmean(info.reward for info in infos),
        length=fmean(info.response_tokens for info in infos),
        truncated_ratio=fmean(info.truncated for info in infos),
        problems=len(problems),
        samples=samples,
        pass_at=_pass_at(judged, samples) if has_pass_at else {},
        maj_at=_maj_at(judged, samples, votes) if has_pass_at and votes is not None else {},
    )


def _pass_at(problems: Sequence[Sequence[SampleInfo]], samples: int) -> dict[int, Estimate]:
    """Estimate pass@k by k, over the problems with at least k judged samples."""
    counts = [(len(problem), sum(bool(info.right) for info in problem)) for problem in problems]
    return {
        k: mean_over_problems(values)
        for k in k_values(samples)
        if (values := [pass_at_k(n, right, k) for n, right in counts if n >= k])
    }


def _maj_at(problems: Sequence[Sequence[SampleInfo]], samples: int, votes: Votes) -> dict[int, Estimate]:
    """Estimate maj@k by k. All right samples gave one answer; wrong ones are told apart by their answer numbers."""
    values: dict[int, list[float]] = {k: [] for k in k_values(samples)}
    for problem in problems:
        wrong = Counter(votes[info.key] for info in problem if not info.right)
        abstaining, right = wrong.pop(None, 0), sum(bool(info.right) for info in problem)
        ks = [k for k in values if k <= len(problem)]
        for k, value in zip(ks, maj_at_k(right, wrong.values(), abstaining, ks), strict=True):
            values[k].append(value)
    return {k: mean_over_problems(problem_values) for k, problem_values in values.items() if problem_values}
