"""Score an eval set from its samples, and write the scores to a file."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_json
from grpo_mp.utils.types import SampleInfo


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its standard error, which is None for a single problem."""

    value: float
    error: float | None = None


def mean_over_problems(values: Sequence[float]) -> Estimate:
    """Return the mean and the standard error of `values`, one value per problem, at least one.

    The error is over problems, because samples of one problem are not independent (Miller 2024, arXiv 2411.00640,
    sections 2 and 3.1).
    """
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error)


def k_values(samples: int) -> tuple[int, ...]:
    """Return the k of pass@k: powers of two up to the number of samples, and that number itself."""
    return tuple(sorted({*(2**power for power in range(samples.bit_length())), samples}))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is right: 1 - C(n - c, k) / C(n, k), unbiased.

    Chen et al. 2021, arXiv 2107.03374, eq. 1, with n = `samples` and c = `right`.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(right: int, wrong: Iterable[int]) -> float:
    """Return the probability that the most frequent answer is right, from the number of samples with each answer.

    Of t answers that tie, each wins with probability 1 / t.
    """
    counts = [right, *wrong]
    return (right == max(counts)) / counts.count(right) if right else 0.0


Votes = Mapping[tuple[int, ...], int | None]  # key of a sample -> number of its answer in the problem; None: no answer


@dataclass(frozen=True)
class EvalScore:
    """Scores of one eval set; all problems have the same weight."""

    accuracy: float | None  # avg@n: mean over problems of the share of right samples; None: none is judged
    reward: float
    length: float  # mean response tokens
    accuracy_error: float | None = None  # standard error over problems
    truncated_ratio: float = 0.0
    unanswered: int = 0  # samples without a generated token
    problems: int = 0  # including those that are too long
    too_long: int = 0  # problems that count as wrong, because their prompt is too long
    samples: int = 1  # per problem
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)  # by k; empty for one sample
    maj_at: Mapping[int, Estimate] = field(default_factory=dict)  # of all samples
    reward_terms: Mapping[str, float] = field(default_factory=dict)  # unweighted mean of each term where it applies


@dataclass(frozen=True)
class _ScoreFile:
    sets: dict[str, EvalScore]


def score_eval_set(infos: Sequence[SampleInfo], votes: Votes | None = None, too_long: int = 0) -> EvalScore:
    """Score the samples of an eval set, at least one. `votes`: answer numbers for maj@n.

    `too_long`: number of problems whose prompt is too long to be sampled. They count as wrong in accuracy, pass@k and
    maj@n, and in no other mean. Samples whose `is_correct` is None count only in reward, length and truncated_ratio;
    samples without a reward do not count in the reward.
    """
    problems = defaultdict[int, list[SampleInfo]](list)
    for info in infos:
        problems[info.group_id].append(info)
    judged = [[info for info in problem if info.is_correct is not None] for problem in problems.values()]
    judged = [problem for problem in judged if problem]
    shares = [fmean(bool(info.is_correct) for info in problem) for problem in judged]
    accuracy = mean_over_problems([*shares, *[0.0] * too_long]) if shares else None
    samples = max(map(len, problems.values()))
    has_pass_at = samples > 1 and accuracy is not None
    return EvalScore(
        accuracy=accuracy.value if accuracy else None,
        accuracy_error=accuracy.error if accuracy else None,
        reward=fmean([info.reward for info in infos if info.is_scored] or [0.0]),
        length=fmean(info.all_response_tokens for info in infos),
        truncated_ratio=fmean(info.truncated for info in infos),
        unanswered=sum(info.generated_tokens == 0 for info in infos),
        problems=len(problems) + too_long,
        too_long=too_long,
        samples=samples,
        pass_at=_pass_at(judged, samples, too_long) if has_pass_at else {},
        maj_at=_maj_at(judged, samples, votes, too_long) if has_pass_at and votes is not None else {},
        reward_terms=means(info.reward_terms for info in infos),
    )


def means(measured: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return name -> mean, over the mappings that contain the name."""
    values = defaultdict[str, list[float]](list)
    for one in measured:
        for name, value in one.items():
            values[name].append(value)
    return {name: fmean(found) for name, found in values.items()}


def _pass_at(problems: Sequence[Sequence[SampleInfo]], samples: int, too_long: int) -> dict[int, Estimate]:
    counts = [(len(problem), sum(bool(info.is_correct) for info in problem)) for problem in problems]
    counts += [(samples, 0)] * too_long
    return {
        k: mean_over_problems(values)
        for k in k_values(samples)
        if (values := [pass_at_k(n, right, k) for n, right in counts if n >= k])
    }


def _maj_at(problems: Sequence[Sequence[SampleInfo]], samples: int, votes: Votes, too_long: int) -> dict[int, Estimate]:
    """Estimate maj@n of all n samples. All right samples have one answer; wrong answers differ by their numbers."""
    values = [0.0] * too_long
    for problem in problems:
        if len(problem) == samples:
            wrong = Counter(votes[info.key] for info in problem if not info.is_correct)
            wrong.pop(None, None)  # samples without an answer do not vote
            values.append(majority(sum(bool(info.is_correct) for info in problem), wrong.values()))
    return {samples: mean_over_problems(values)} if values else {}


def step_file(run_folder: Path, step: int) -> Path:
    """Return the path of a run's scores after a step; step 0 is before training."""
    return run_folder / "eval" / f"step_{step:06d}.json"


def write_scores(file: Path, scores: Mapping[str, EvalScore], **metadata: Any) -> None:
    """Write the scores of all eval sets with their metadata, atomically."""
    write_json(file, {**metadata, "sets": {name: asdict(score) for name, score in scores.items()}})


def read_scores(file: Path) -> dict[str, EvalScore]:
    """Read the file that `write_scores` wrote."""
    try:
        return TypeAdapter(_ScoreFile).validate_json(file.read_bytes(), strict=True).sets
    except (OSError, ValidationError) as error:
        found = str(error) if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise UserError(f"{file}: no scores of an evaluation ({found}): remove it") from error
