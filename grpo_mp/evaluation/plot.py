"""The plot of pass@k and maj@k over k, before and after training."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mp.evaluation.pass_at_k import Estimate
from grpo_mp.evaluation.score import EvalScore

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (6.0, 4.0)  # of one set
COLOURS = {"before": "tab:gray", "after": "tab:blue"}


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
                _plot_line(axes, score.pass_at, f"{prefix}pass@k", COLOURS[when], "-")
                _plot_line(axes, score.maj_at, f"{prefix}maj@k", COLOURS[when], "--")
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

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "grpo_mp"}):
        figure.savefig(file, format="svg", metadata={"Date": None})


def _plot_line(axes: "Axes", estimates: Mapping[int, Estimate], label: str, colour: str, style: str) -> None:
    if not estimates:
        return
    ks, means = list(estimates), [estimate.value for estimate in estimates.values()]
    errors = [estimate.error or 0.0 for estimate in estimates.values()]
    axes.plot(ks, means, style, color=colour, marker="o", markersize=3, label=label)
    low, high = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
    axes.fill_between(ks, low, high, color=colour, alpha=0.15, linewidth=0)
