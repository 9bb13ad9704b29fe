"""The score of one eval set: made of its samples, written to a file, plotted over k."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from grpo_mp.algorithms.pass_at_k import Estimate, k_values, maj_at_k, mean_over_problems, pass_at_k
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_atomically, write_json
from grpo_mp.utils.types import SampleInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Votes = Mapping[tuple[int, ...], int | None]  # sample -> number of its answer, unique in its problem; None: no answer
INCHES = (6.0, 4.0)  # of a set's plot
COLORS = {"before": "tab:gray", "after": "tab:blue"}


@dataclass(frozen=True)
class EvalScore:
    """The score of one eval set; all problems count alike."""

    accuracy: float | None  # avg@n: mean over problems of the share of right samples; None: correctness is not defined
    reward: float
    length: float  # tokens
    accuracy_error: float | None = None  # standard error over problems
    truncated_ratio: float = 0.0
    unanswered: int = 0  # samples without a generated token
    problems: int = 0  # with those that are too long
    too_long: int = 0  # problems that were not asked, as their prompt is too long: they count as wrong
    samples: int = 1  # of each problem
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)  # by k; empty for one sample
    maj_at: Mapping[int, Estimate] = field(default_factory=dict)
    reward_terms: Mapping[str, float] = field(default_factory=dict)  # by name, unweighted; mean where it applies


@dataclass(frozen=True)
class _ScoreFile:
    sets: dict[str, EvalScore]


def score_eval_set(infos: Sequence[SampleInfo], votes: Votes | None = None, too_long: int = 0) -> EvalScore:
    """Score the samples of a set, at least one; `votes` for maj@k.

    `too_long`: problems whose prompt is too long to be asked. They are wrong in accuracy, pass@k and maj@k, and count
    in no other mean. Samples without a judgement (`is_correct` is None) count in reward, length and truncated_ratio
    only, those without a reward not in the reward.
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
        reward_terms=_reward_terms(infos),
    )


def _reward_terms(infos: Sequence[SampleInfo]) -> dict[str, float]:
    values = defaultdict[str, list[float]](list)
    for info in infos:
        for name, value in info.reward_terms.items():
            values[name].append(value)
    return {name: fmean(found) for name, found in values.items()}


def _pass_at(problems: Sequence[Sequence[SampleInfo]], samples: int, too_long: int) -> dict[int, Estimate]:
    """Estimate pass@k by k, over the problems with at least k judged samples, and those that are too long."""
    counts = [(len(problem), sum(bool(info.is_correct) for info in problem)) for problem in problems]
    counts += [(samples, 0)] * too_long
    return {
        k: mean_over_problems(values)
        for k in k_values(samples)
        if (values := [pass_at_k(n, right, k) for n, right in counts if n >= k])
    }


def _maj_at(problems: Sequence[Sequence[SampleInfo]], samples: int, votes: Votes, too_long: int) -> dict[int, Estimate]:
    """Estimate maj@k by k. All right samples gave one answer; wrong ones are told apart by their answer numbers."""
    values: dict[int, list[float]] = {k: [0.0] * too_long for k in k_values(samples)}
    for problem in problems:
        wrong = Counter(votes[info.key] for info in problem if not info.is_correct)
        abstaining, right = wrong.pop(None, 0), sum(bool(info.is_correct) for info in problem)
        ks = [k for k in values if k <= len(problem)]
        for k, value in zip(ks, maj_at_k(right, wrong.values(), abstaining, ks), strict=True):
            values[k].append(value)
    return {k: mean_over_problems(problem_values) for k, problem_values in values.items() if problem_values}


def step_file(run_folder: Path, step: int) -> Path:
    """Return where a run keeps its scores after a step; 0 is before training."""
    return run_folder / "eval" / f"step_{step:06d}.json"


def write_scores(file: Path, scores: Mapping[str, EvalScore], **metadata: Any) -> None:
    """Write the scores of all sets with their metadata; a reader never sees half a file."""
    write_json(file, {**metadata, "sets": {name: asdict(score) for name, score in scores.items()}})


def read_scores(file: Path) -> dict[str, EvalScore]:
    """Read what `write_scores` wrote. Raises UserError for another file."""
    try:
        return TypeAdapter(_ScoreFile).validate_json(file.read_bytes(), strict=True).sets
    except (OSError, ValidationError) as error:
        found = str(error) if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise UserError(f"{file}: no scores of an evaluation ({found}): remove it") from error


def plot_pass_at_k(before: Mapping[str, EvalScore], after: Mapping[str, EvalScore]) -> "Figure | None":
    """Plot one panel for each set with several samples of a problem; None where no set has them.

    A line is a mean over problems, its band one standard error to either side.
    """
    sets = [name for name, score in after.items() if score.pass_at]
    if not sets:
        return None
    from matplotlib.figure import Figure  # takes half a second, which most processes need not spend

    figure = Figure(figsize=(INCHES[0] * len(sets), INCHES[1]), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets, strict=True):
        scores = {"before": before.get(name), "after": after[name]} if before else {"after": after[name]}
        for when, score in scores.items():
            if score:
                prefix = f"{when}: " if before else ""
                _plot_line(axes, score.pass_at, f"{prefix}pass@k", COLORS[when], "-")
                _plot_line(axes, score.maj_at, f"{prefix}maj@k", COLORS[when], "--")
        ks = list(after[name].pass_at)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, list(map(str, ks)))
        axes.set(ylim=(0.0, 1.0), xlabel="k, samples of a problem", ylabel="share of problems")
        axes.set_title(f"{name}: {after[name].problems} problems x {after[name].samples} samples, ± standard error")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    return figure


def write_svg(figure: "Figure", file: Path) -> None:
    """Write a figure whose text stays text; the same figure gives the same bytes."""
    import matplotlib

    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "grpo_mp"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    write_atomically(file, text.getvalue())


def _plot_line(axes: "Axes", estimates: Mapping[int, Estimate], label: str, color: str, style: str) -> None:
    if not estimates:
        return
    ks, means = list(estimates), [estimate.value for estimate in estimates.values()]
    errors = [estimate.error or 0.0 for estimate in estimates.values()]
    axes.plot(ks, means, style, color=color, marker="o", markersize=3, label=label)
    low, high = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
    axes.fill_between(ks, low, high, color=color, alpha=0.15, linewidth=0)
