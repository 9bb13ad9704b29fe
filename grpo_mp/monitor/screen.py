"""How progress looks: pure functions from what is known about the run to text and rich tables."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_mp.evaluation.pass_at_k import Estimate
from grpo_mp.evaluation.score import EvalScore

__all__ = ["AnswerPair", "EvalScore", "View"]

PHASES = {
    "GENERATE": "the engines write answers",
    "SCORE": "the rewards score the answers",
    "LOGPROB": "policy and reference compute logprobs",
    "TRAIN": "the policy is updated",
    "SYNC": "new weights go to the engines",
    "SAVE": "a checkpoint is written",
    "EVAL": "held-out prompts are answered",
}
LONGEST_TEXT = 1500  # characters of a question or answer that are shown


@dataclass(frozen=True)
class Figure:
    """One row of a table of scores."""

    label: str
    estimate: Estimate
    form: str

    def __str__(self) -> str:
        error = self.estimate.error
        spread = "" if error is None else f" ± {error:{self.form}}".removesuffix("%")
        return f"{self.estimate.value:{self.form}}{spread}"


@dataclass(frozen=True)
class AnswerPair:
    """One question and what the policy answered before and after training."""

    question: str
    before: str
    after: str
    expected: str | None = None


@dataclass(frozen=True)
class View:
    """What the live line shows. `scalars` are those of the last step, under their metric names."""

    steps: int
    done: int = 0
    phase: str = ""
    detail: str = ""
    phase_s: float = 0.0
    left_s: float | None = None
    accuracy: float | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)


def step_line(view: View) -> str:
    """One finished step in one plain line; figures that are not known are left out."""
    parts = [f"step {view.done}/{view.steps}", *_figures(view)]
    phases = [f"{name.lower()} {view.scalars[key]:.1f}" for name in PHASES if (key := _seconds(name)) in view.scalars]
    if "time/step_s" in view.scalars:
        parts.append(f"{view.scalars['time/step_s']:.1f} s" + (f" ({', '.join(phases)})" if phases else ""))
    if view.left_s is not None:
        parts.append(f"{duration(view.left_s)} left")
    return "  ".join(parts)


def eval_line(step: int, scores: Mapping[str, EvalScore]) -> str:
    """One evaluation in one plain line."""
    return f"eval after step {step}: " + "; ".join(f"{name} {_in_words(one)}" for name, one in scores.items())


def live(view: View) -> RenderableType:
    """The moving lines at the foot of a terminal: what happens now, and how far the run is, if it has steps."""
    now = Text(f"{view.phase:<8} " if view.phase else "", style="bold cyan")
    words = [PHASES.get(view.phase, ""), view.detail, f"{view.phase_s:.0f} s" if view.phase else ""]
    now.append("  ".join(word for word in words if word), style="not bold default")
    if not view.steps:  # an evaluation alone
        return now
    bar = Table.grid(padding=(0, 2))
    left = "" if view.left_s is None else f"{duration(view.left_s)} left"
    count = Text(f"step {view.done}/{view.steps}", style="bold")
    bar.add_row(count, ProgressBar(view.steps, view.done, width=24), "  ".join([*_figures(view), left]))
    return Group(now, bar)


def comparison(before: Mapping[str, EvalScore], after: Mapping[str, EvalScore]) -> Table:
    """The figures of each eval set before and after training."""
    table = Table(title="Before and after", title_justify="left")
    table.add_column("eval set")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right" if column else "left")
    for name, new in after.items():
        old = {figure.label: figure for figure in _rows(before[name])} if name in before else {}
        for row, figure in enumerate(_rows(new)):
            table.add_row("" if row else name, figure.label, *_change(old.get(figure.label), figure))
    return table


def scores(of_sets: Mapping[str, EvalScore], title: str) -> Table:
    """The figures of each eval set."""
    table = Table(title=title, title_justify="left")
    for column in ("eval set", "", "score"):
        table.add_column(column, justify="right" if column == "score" else "left")
    for name, one in of_sets.items():
        for row, figure in enumerate(_rows(one)):
            table.add_row("" if row else name, figure.label, str(figure))
    return table


def answers(pairs: Sequence[AnswerPair]) -> Table:
    """The questions with their answers before and after. Model text is never read as markup."""
    table = Table(title="The same question before and after", title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for pair in pairs:
        table.add_row("question", _model_text(pair.question))
        if pair.expected is not None:
            table.add_row("expected", _model_text(pair.expected))
        table.add_row("before", _model_text(pair.before))
        table.add_row("after", _model_text(pair.after), end_section=True)
    return table


def tensorboard_command(run_folder: Path) -> str:
    """The command that shows the run's curves in a browser."""
    return f"tensorboard --logdir {shlex.quote(str(run_folder / 'tensorboard'))}"


def duration(seconds: float) -> str:
    """45 s, 3 min 05 s, 2 h 07 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _figures(view: View) -> list[str]:
    accuracy = [] if view.accuracy is None else [f"accuracy {view.accuracy:.1%}"]
    reward = [f"reward {view.scalars['reward/mean']:.3f}"] if "reward/mean" in view.scalars else []
    speed = view.scalars.get("speed/generate_tokens_per_s")
    return [*reward, *accuracy, *([] if speed is None else [f"{speed:.0f} tokens/s"])]


def _seconds(phase: str) -> str:
    return f"time/{phase.lower()}_s"


def _rows(one: EvalScore) -> list[Figure]:
    """A score's figures from top to bottom; those that are not known are left out."""
    accuracy = [] if one.accuracy is None else [Estimate(one.accuracy, one.accuracy_error)]
    return [
        *(Figure("accuracy" if one.samples == 1 else f"avg@{one.samples}", known, ".1%") for known in accuracy),
        *(Figure(f"pass@{k}", estimate, ".1%") for k, estimate in one.pass_at.items()),
        *(Figure(f"maj@{k}", estimate, ".1%") for k, estimate in one.maj_at.items()),
        Figure("reward", Estimate(one.reward), ".3f"),
        Figure("length (tokens)", Estimate(one.length), ".1f"),
    ]


def _change(before: Figure | None, after: Figure) -> tuple[str, str, str]:
    if before is None:
        return "", str(after), ""
    change = f"{after.estimate.value - before.estimate.value:+{after.form}}".replace("%", " points")
    return str(before), str(after), change


def _in_words(one: EvalScore) -> str:
    n = one.samples
    right = [] if one.accuracy is None else [f"{one.accuracy:.1%} right" + (f" (avg@{n})" if n > 1 else "")]
    at = [f"{kind}@{n} {by_k[n].value:.1%}" for kind, by_k in (("pass", one.pass_at), ("maj", one.maj_at)) if n in by_k]
    return ", ".join([*right, *at, f"reward {one.reward:.3f}", f"{one.length:.0f} tokens"])


def _model_text(text: str) -> Text:
    return Text(text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ...")
