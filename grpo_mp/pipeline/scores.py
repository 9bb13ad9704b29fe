"""What each stage of a pipeline has brought: a table and a picture of the held-out scores after it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mp.algorithms.evaluation import EvalScore, read_scores
from grpo_mp.pipeline.stages import EVALUATE, StageJob

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scores = Mapping[str, Mapping[str, EvalScore]]  # by stage and set
TABLE, PICTURE = "scores.md", "scores.svg"
INCHES = (6.0, 3.5)  # of a set's plot


def read_stage_scores(jobs: Sequence[StageJob]) -> dict[str, dict[str, EvalScore]]:
    """Return the scores that are there, by stage in the order of the jobs, and by eval set. Raises UserError."""
    found = [job for job in jobs if job.command == EVALUATE and job.result.exists()]
    return {job.stage: read_scores(job.result) for job in found}


def score_table(scores: Scores, seconds: Mapping[str, float]) -> str:
    """Return a table in Markdown, a row for each stage and set. `seconds`: what each stage took."""
    header = "| after | set | accuracy, % | pass@k, % | reward terms | answer, tokens | cut off, % | stage, s |"
    lines = [header, "|---|---|---|---|---|---|---|---|"]
    for stage, sets in scores.items():
        for name, score in sets.items():
            took = f"{seconds[stage]:.0f}" if stage in seconds else ""
            terms = ", ".join(f"{term} {value:.2f}" for term, value in score.reward_terms.items())
            cells = (stage, name, _accuracy(score), _pass_at(score), terms, f"{score.length:.1f}")
            lines.append("| " + " | ".join([*cells, f"{100 * score.truncated_ratio:.1f}", took]) + " |")
    return "\n".join(lines) + "\n"


def _accuracy(score: EvalScore) -> str:
    if score.accuracy is None:
        return ""
    error = f" ± {100 * score.accuracy_error:.1f}" if score.accuracy_error is not None else ""
    return f"{100 * score.accuracy:.1f}{error}"


def _pass_at(score: EvalScore) -> str:
    if not score.pass_at:
        return ""
    k = max(score.pass_at)
    return f"{100 * score.pass_at[k].value:.1f} (k = {k})"


def plot_scores(scores: Scores) -> "Figure | None":
    """Plot the accuracy after each stage, a panel for each set; bars to either side are one standard error."""
    names = list(dict.fromkeys(name for sets in scores.values() for name in sets))
    names = [
        name for name in names if any(name in sets and sets[name].accuracy is not None for sets in scores.values())
    ]
    if not names:
        return None
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure(figsize=(INCHES[0], INCHES[1] * len(names)), layout="constrained")
    for number, name in enumerate(names, 1):
        rows = [
            (stage, sets[name]) for stage, sets in scores.items() if name in sets and sets[name].accuracy is not None
        ]
        axes = figure.add_subplot(len(names), 1, number)
        heights = [100 * (score.accuracy or 0.0) for _, score in rows]
        errors = [100 * (score.accuracy_error or 0.0) for _, score in rows]
        axes.bar([stage for stage, _ in rows], heights, yerr=errors, color="tab:blue", capsize=3)
        axes.set(title=name, ylabel="accuracy, %", ylim=(0, 100))
        axes.tick_params(axis="x", rotation=30)
    return figure


def write_stage_scores(folder: Path, scores: Scores, seconds: Mapping[str, float]) -> None:
    """Write the table and the picture into the pipeline's folder, and show the table."""
    from grpo_mp.algorithms.evaluation import write_svg
    from grpo_mp.utils.files import write_atomically

    table = score_table(scores, seconds)
    write_atomically(folder / TABLE, table)
    if figure := plot_scores(scores):
        write_svg(figure, folder / PICTURE)
    print(table, end="", flush=True)
