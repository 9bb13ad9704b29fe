"""Progress output: live lines on a terminal, plain lines in a log, tables at the end. Only rank 0 prints."""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_mp.algorithms.evaluation import Estimate, EvalScore
from grpo_mp.monitor.metrics import metric_name
from grpo_mp.utils.phases import Phase

LOGGER = logging.getLogger(__name__)
Scores = Mapping[str, EvalScore]


@dataclass(frozen=True)
class View:
    """State of the run that the display shows. `scalars`: metrics of the last step."""

    steps: int
    done: int = 0
    phase: str = ""
    detail: str = ""
    phase_s: float = 0.0
    remaining_s: float | None = None
    accuracy: float | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)


class Progress:
    """Prints one line per step and, on a terminal, the current phase below. Use as a context manager.

    `steps`: last step of the run; `done`: step from which the run resumes.
    """

    def __init__(
        self,
        run_folder: Path,
        steps: int,
        done: int = 0,
        rank: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = run_folder
        self._console = (console or Console(highlight=False)) if rank == 0 else Console(quiet=True)
        self._clock = clock
        self._view = View(steps=steps, done=done)
        self._resumed_from = done
        self._phase_began_s = clock()
        self._loop_began_s: float | None = None
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2, transient=True)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._console.quiet:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the live display; a second call has no effect."""
        self._live.stop()

    def note(self, text: str) -> None:
        LOGGER.info(text)
        self._print(text)

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Show a phase during the `with` body. The first GENERATE or TRAIN starts the clock for the time left."""
        outer, outer_began_s = self._view, self._phase_began_s
        self._phase_began_s = self._clock()
        if name in (Phase.GENERATE, Phase.TRAIN) and self._loop_began_s is None:
            self._loop_began_s = self._phase_began_s
        self._view = replace(self._view, phase=name, detail=detail)
        self._live.refresh()
        try:
            yield
        finally:
            self._phase_began_s = outer_began_s
            self._view = replace(self._view, phase=outer.phase, detail=outer.detail)

    def step(self, step: int, scalars: Mapping[str, float], accuracy: float | None = None) -> None:
        """Print the line of a finished step. `accuracy`: share of correct answers, if known."""
        remaining_s, steps_since_start = None, step - self._resumed_from
        if self._loop_began_s is not None and steps_since_start > 0:
            remaining_s = (self._clock() - self._loop_began_s) / steps_since_start * (self._view.steps - step)
        self._view = replace(self._view, done=step, scalars=dict(scalars), accuracy=accuracy, remaining_s=remaining_s)
        self.note(step_line(self._view))

    def print_eval(self, step: int, scores: Scores) -> None:
        """Print the scores of the eval sets after `step`; step 0 is before training."""
        self._print(eval_line(step, scores))

    def print_scores(self, title: str, scores: Scores) -> None:
        self.stop()
        self._print("", scores_table(title, scores), "")

    def finish(self, before: Scores, after: Scores) -> None:
        """Print the scores before and after training, and how to open the curves and the timeline."""
        self.stop()
        if after:
            self._print("", scores_table("Before and after", after, before))
        self._print("", f"Curves:   tensorboard --logdir {shlex.quote(str(self._folder / 'tensorboard'))}")
        self._print(f"Timeline: open {self._folder / 'trace.json'} at https://ui.perfetto.dev")

    def _print(self, *items: RenderableType) -> None:
        # soft_wrap keeps long lines of a log in one line.
        for item in items:
            self._console.print(item, markup=False, highlight=False, soft_wrap=isinstance(item, str))

    def _render(self) -> RenderableType:
        return live_view(replace(self._view, phase_s=self._clock() - self._phase_began_s))


def step_line(view: View) -> str:
    """Format a finished step as one plain line; leave out unknown numbers."""
    parts = [f"step {view.done}/{view.steps}", *_step_numbers(view)]
    phase_seconds = [
        f"{phase.lower()} {view.scalars[name]:.1f}"
        for phase in Phase
        if (name := metric_name("time/{phase}_s", phase=phase.lower())) in view.scalars
    ]
    if "time/step_s" in view.scalars:
        phases = f" ({', '.join(phase_seconds)})" if phase_seconds else ""
        parts.append(f"{view.scalars['time/step_s']:.1f} s{phases}")
    if view.remaining_s is not None:
        parts.append(f"{duration(view.remaining_s)} left")
    return "  ".join(parts)


def eval_line(step: int, scores: Scores) -> str:
    """Format an evaluation as one plain line."""
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
    """Render the live display: the current phase, and a progress bar if the run has steps."""
    current = Text(f"{view.phase:<8} " if view.phase else "", style="bold cyan")
    # The startup of a run is shown like a phase but is no member of Phase.
    description = Phase[view.phase].description if view.phase in Phase.__members__ else ""
    parts = [description, view.detail, f"{view.phase_s:.0f} s" if view.phase else ""]
    current.append("  ".join(part for part in parts if part), style="not bold default")
    if not view.steps:  # a command without training steps, such as `grpo-mp evaluate`
        return current
    progress = Table.grid(padding=(0, 2))
    left_text = "" if view.remaining_s is None else f"{duration(view.remaining_s)} left"
    count = Text(f"step {view.done}/{view.steps}", style="bold")
    progress.add_row(count, ProgressBar(view.steps, view.done, width=24), "  ".join([*_step_numbers(view), left_text]))
    return Group(current, progress)


def _step_numbers(view: View) -> list[str]:
    accuracy = [] if view.accuracy is None else [f"accuracy {view.accuracy:.1%}"]
    reward = [f"reward {view.scalars['reward/mean']:.3f}"] if "reward/mean" in view.scalars else []
    reward += [f"loss {view.scalars['sft/loss']:.4f}"] if "sft/loss" in view.scalars else []
    speeds = ("speed/generate_tokens_per_s", "speed/train_tokens_per_s")
    speed = next((view.scalars[name] for name in speeds if name in view.scalars), None)
    return [*reward, *accuracy, *([] if speed is None else [f"{speed:.0f} tokens/s"])]


def scores_table(title: str, scores: Scores, before: Scores | None = None) -> Table:
    """Return a table of each eval set's scores; with `before`, also the earlier scores and the changes."""
    table = Table(title=title, title_justify="left")
    table.add_column("eval set")
    for column in ("", "score") if before is None else ("", "before", "after", "change"):
        table.add_column(column, justify="right" if column else "left")
    for name, score in scores.items():
        earlier = _score_rows(before[name]) if before and name in before else {}
        for index, (label, (estimate, form)) in enumerate(_score_rows(score).items()):
            cells = [_with_error(estimate, form)]
            if before is not None:
                old = earlier[label][0] if label in earlier else None
                change = f"{estimate.value - old.value:+{form}}".replace("%", " points") if old else ""
                cells = [_with_error(old, form) if old else "", *cells, change]
            table.add_row("" if index else name, label, *cells)
    return table


def _score_rows(score: EvalScore) -> dict[str, tuple[Estimate, str]]:
    """Return the known estimates of a score: label -> (estimate, number format), in the order of display."""
    rows = {}
    if score.accuracy is not None:
        label = "accuracy" if score.samples == 1 else f"avg@{score.samples}"
        rows[label] = Estimate(score.accuracy, score.accuracy_error), ".1%"
    rows |= {f"pass@{k}": (estimate, ".1%") for k, estimate in score.pass_at.items()}
    rows |= {f"maj@{k}": (estimate, ".1%") for k, estimate in score.maj_at.items()}
    rows["reward"] = Estimate(score.reward), ".3f"
    rows["length (tokens)"] = Estimate(score.length), ".1f"
    if score.too_long:
        rows[f"too long, of {score.problems} problems"] = Estimate(score.too_long), ".0f"
    return rows


def _with_error(estimate: Estimate, form: str) -> str:
    error = "" if estimate.error is None else f" ± {estimate.error:{form}}".removesuffix("%")
    return f"{estimate.value:{form}}{error}"


def duration(seconds: float) -> str:
    """Format a duration: 45 s, 3 min 05 s, 2 h 07 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
