"""The score of one eval set, made of its samples. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from grpo_mp.evaluation.pass_at_k import Estimate, maj_at_k, over_problems, pass_at_k, sizes
from grpo_mp.types import SampleInfo

Votes = Mapping[tuple[int, int], int | None]  # sample -> number of its answer, unique in its problem; None: no answer


@dataclass(frozen=True)
class EvalScore:
    """What the samples of one eval set come to. A problem counts as much as another."""

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
    """The score of a set's samples, at least one; `votes` for maj@k. Samples that nothing judges count in reward and
    length alone.
    """
    problems = defaultdict[int, list[SampleInfo]](list)
    for info in infos:
        problems[info.group_id].append(info)
    judged = [[info for info in problem if info.right is not None] for problem in problems.values()]
    judged = [problem for problem in judged if problem]
    accuracy = over_problems([fmean(bool(info.right) for info in problem) for problem in judged]) if judged else None
    samples = max(map(len, problems.values()))
    several = samples > 1 and accuracy is not None
    return EvalScore(
        accuracy=accuracy.value if accuracy else None,
        accuracy_error=accuracy.error if accuracy else None,
        reward=fmean(info.reward for info in infos),
        length=fmean(info.response_tokens for info in infos),
        truncated_ratio=fmean(info.truncated for info in infos),
        problems=len(problems),
        samples=samples,
        pass_at=_pass_at(judged, samples) if several else {},
        maj_at=_maj_at(judged, samples, votes) if several and votes is not None else {},
    )


def as_tree(of_set: EvalScore) -> dict[str, Any]:
    """A score as JSON holds it."""
    return asdict(of_set)


def of_tree(tree: Mapping[str, Any]) -> EvalScore:
    """What `as_tree` gave, read back from JSON, which knows only text as keys."""
    at = {kind: {int(k): Estimate(**estimate) for k, estimate in tree[kind].items()} for kind in ("pass_at", "maj_at")}
    return EvalScore(**{**tree, **at})


def _pass_at(problems: Sequence[Sequence[SampleInfo]], samples: int) -> dict[int, Estimate]:
    """By k, over the problems with so many judged samples."""
    counts = [(len(problem), sum(bool(info.right) for info in problem)) for problem in problems]
    return {
        k: over_problems(values)
        for k in sizes(samples)
        if (values := [pass_at_k(drawn, right, k) for drawn, right in counts if drawn >= k])
    }


def _maj_at(problems: Sequence[Sequence[SampleInfo]], samples: int, votes: Votes) -> dict[int, Estimate]:
    """All right samples gave one answer, the right one; wrong ones are told apart by their numbers."""
    values: dict[int, list[float]] = {k: [] for k in sizes(samples)}
    for problem in problems:
        wrong = Counter(votes[info.key] for info in problem if not info.right)
        abstaining, right = wrong.pop(None, 0), sum(bool(info.right) for info in problem)
        ks = [k for k in values if k <= len(problem)]
        for k, value in zip(ks, maj_at_k(right, wrong.values(), abstaining, ks), strict=True):
            values[k].append(value)
    return {k: over_problems(found) for k, found in values.items() if found}
