"""Layout of the progress output: pure functions from the run's state to text and rich tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_mp.algorithms.evaluation import Estimate, EvalScore
from grpo_mp.monitor.metrics import metric_name
from grpo_mp.utils.phases import Phase

LONGEST_TEXT = 1500  # characters of a question or answer that are shown


@dataclass(frozen=True)
class ScoreRow:
    """One row of a table of scores."""

    label: str
    estimate: Estimate
    format_spec: str

    def __str__(self) -> str:
        error = self.estimate.error
        margin = "" if error is None else f" ± {error:{self.format_spec}}".removesuffix("%")
        return f"{self.estimate.value:{self.format_spec}}{margin}"


@dataclass(frozen=True)
class AnswerPair:
    """One question and what the policy answered before and after training."""

    question: str
    before: str
    after: str
    expected: str | None = None


@dataclass(frozen=True)
class View:
    """State that the live lines show. `scalars` are those of the last step, under their metric names."""

    steps: int
    done: int = 0
    phase: str = ""
    detail: str = ""
    phase_s: float = 0.0
    remaining_s: float | None = None
    accuracy: float | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)


def step_line(view: View) -> str:
    """Render one finished step as one plain line; unknown numbers are left out."""
    parts = [f"step {view.done}/{view.steps}", *_step_numbers(view)]
    phase_seconds = [
        f"{phase.lower()} {view.scalars[name]:.1f}"
        for phase in Phase
        if (name := metric_name("time/{phase}_s", phase=phase.lower())) in view.scalars
    ]
    if "time/step_s" in view.scalars:
        parts.append(
            f"{view.scalars['time/step_s']:.1f} s" + (f" ({', '.join(phase_seconds)})" if phase_seconds else "")
        )
    if view.remaining_s is not None:
        parts.append(f"{duration(view.remaining_s)} left")
    return "  ".join(parts)


def eval_line(step: int, scores: Mapping[str, EvalScore]) -> str:
    """Render one evaluation as one plain line."""
    texts = []
    for name, score in scores.items():
        samples, numbers = score.samples, list[str]()
        if score.accuracy is not None:
            numbers.append(f"{score.accuracy:.1%} right" + (f" (avg@{samples})" if samples > 1 else ""))
        for kind, by_k in (("pass", score.pass_at), ("maj", score.maj_at)):
            if samples in by_k:
                numbers.append(f"{kind}@{samples} {by_k[samples].value:.1%}")
        texts.append(f"{name} " + ", ".join([*numbers, f"reward {score.reward:.3f}", f"{score.length:.0f} tokens"]))
    return f"eval after step {step}: " + "; ".join(texts)


def live_view(view: View) -> RenderableType:
    """Render the live lines of a terminal: the current phase, and the progress of a run that has steps."""
    current = Text(f"{view.phase:<8} " if view.phase else "", style="bold cyan")
    # The start of a run is shown like a phase, but is none.
    description = Phase[view.phase].description if view.phase in Phase.__members__ else ""
    parts = [description, view.detail, f"{view.phase_s:.0f} s" if view.phase else ""]
    current.append("  ".join(part for part in parts if part), style="not bold default")
    if not view.steps:  # an evaluation alone
        return current
    progress = Table.grid(padding=(0, 2))
    left_text = "" if view.remaining_s is None else f"{duration(view.remaining_s)} left"
    count = Text(f"step {view.done}/{view.steps}", style="bold")
    progress.add_row(count, ProgressBar(view.steps, view.done, width=24), "  ".join([*_step_numbers(view), left_text]))
    return Group(current, progress)


def comparison(before: Mapping[str, EvalScore], after: Mapping[str, EvalScore]) -> Table:
    """Tabulate the scores of each eval set before and after training."""
    table = Table(title="Before and after", title_justify="left")
    table.add_column("eval set")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right" if column else "left")
    for name, score in after.items():
        before_rows = {row.label: row for row in _score_rows(before[name])} if name in before else {}
        for index, row in enumerate(_score_rows(score)):
            earlier, change = before_rows.get(row.label), ""
            if earlier:
                change = f"{row.estimate.value - earlier.estimate.value:+{row.format_spec}}".replace("%", " points")
            table.add_row("" if index else name, row.label, str(earlier or ""), str(row), change)
    return table


def scores_table(scores_by_set: Mapping[str, EvalScore], title: str) -> Table:
    """Tabulate the scores of each eval set."""
    table = Table(title=title, title_justify="left")
    for column in ("eval set", "", "score"):
        table.add_column(column, justify="right" if column == "score" else "left")
    for name, score in scores_by_set.items():
        for index, row in enumerate(_score_rows(score)):
            table.add_row("" if index else name, row.label, str(row))
    return table


def answers_table(pairs: Sequence[AnswerPair]) -> Table:
    """Tabulate questions with their answers before and after. Model text is never read as markup."""
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


def duration(seconds: float) -> str:
    """Format a duration: 45 s, 3 min 05 s, 2 h 07 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _step_numbers(view: View) -> list[str]:
    accuracy = [] if view.accuracy is None else [f"accuracy {view.accuracy:.1%}"]
    reward = [f"reward {view.scalars['reward/mean']:.3f}"] if "reward/mean" in view.scalars else []
    reward += [f"loss {view.scalars['sft/loss']:.4f}"] if "sft/loss" in view.scalars else []
    speeds = ("speed/generate_tokens_per_s", "speed/train_tokens_per_s")
    speed = next((view.scalars[name] for name in speeds if name in view.scalars), None)
    return [*reward, *accuracy, *([] if speed is None else [f"{speed:.0f} tokens/s"])]


def _score_rows(score: EvalScore) -> list[ScoreRow]:
    """List the rows of a score from top to bottom; unknown ones are left out."""
    rows = []
    if score.accuracy is not None:
        label = "accuracy" if score.samples == 1 else f"avg@{score.samples}"
        rows.append(ScoreRow(label, Estimate(score.accuracy, score.accuracy_error), ".1%"))
    rows += [ScoreRow(f"pass@{k}", estimate, ".1%") for k, estimate in score.pass_at.items()]
    rows += [ScoreRow(f"maj@{k}", estimate, ".1%") for k, estimate in score.maj_at.items()]
    rows.append(ScoreRow("reward", Estimate(score.reward), ".3f"))
    rows.append(ScoreRow("length (tokens)", Estimate(score.length), ".1f"))
    if score.too_long:
        rows.append(ScoreRow(f"too long, of {score.problems} problems", Estimate(score.too_long), ".0f"))
    return rows


def _model_text(text: str) -> Text:
    return Text(text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ...")
