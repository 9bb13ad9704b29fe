"""How progress looks: pure functions from what is known about the run to text and rich tables."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
class EvalScore:
    """Means over one eval set: share answered rightly (None: the reward does not say), reward, response tokens."""

    accuracy: float | None
    reward: float
    length: float


FIGURES: tuple[tuple[str, Callable[[EvalScore], float | None], str], ...] = (
    ("accuracy", lambda score: score.accuracy, ".1%"),
    ("reward", lambda score: score.reward, ".3f"),
    ("length (tokens)", lambda score: score.length, ".1f"),
)


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
    right = {name: "" if s.accuracy is None else f"{s.accuracy:.1%} right, " for name, s in scores.items()}
    sets = [f"{name} {right[name]}reward {s.reward:.3f}, {s.length:.0f} tokens" for name, s in scores.items()]
    return f"eval after step {step}: " + "; ".join(sets)


def live(view: View) -> RenderableType:
    """The two moving lines at the foot of a terminal: what happens now, and how far the run is."""
    now = Text(f"{view.phase:<8} " if view.phase else "", style="bold cyan")
    words = [PHASES.get(view.phase, ""), view.detail, f"{view.phase_s:.0f} s" if view.phase else ""]
    now.append("  ".join(word for word in words if word), style="not bold default")
    bar = Table.grid(padding=(0, 2))
    left = "" if view.left_s is None else f"{duration(view.left_s)} left"
    count = Text(f"step {view.done}/{view.steps}", style="bold")
    bar.add_row(count, ProgressBar(view.steps, view.done, width=24), "  ".join([*_figures(view), left]))
    return Group(now, bar)


def comparison(before: Mapping[str, EvalScore], after: Mapping[str, EvalScore]) -> Table:
    """Accuracy, reward and length of each eval set before and after training."""
    table = Table(title="Before and after", title_justify="left")
    table.add_column("eval set")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right" if column else "left")
    for name, new in after.items():
        old = before.get(name)
        known = [row for row in FIGURES if row[1](new) is not None]
        for place, (label, figure, form) in enumerate(known):
            table.add_row("" if place else name, label, *_change(old, new, figure, form))
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


def _change(
    before: EvalScore | None, after: EvalScore, figure: Callable[[EvalScore], float | None], form: str
) -> tuple[str, str, str]:
    new, old = figure(after), figure(before) if before else None
    if new is None or old is None:
        return "", "" if new is None else f"{new:{form}}", ""
    change = f"{new - old:+{form}}".replace("%", " points")
    return f"{old:{form}}", f"{new:{form}}", change


def _model_text(text: str) -> Text:
    return Text(text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ...")
