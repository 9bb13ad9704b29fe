"""Progress output: live lines on a terminal, plain lines in a log, tables at the end. Only rank 0 prints."""

import logging
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_mp.monitor.evaluation import Estimate, EvalScore
from grpo_mp.monitor.metrics import metric_name
from grpo_mp.utils.phases import Phase

LOGGER = logging.getLogger(__name__)
Scores = Mapping[str, EvalScore]


class Progress:
    """Prints one line per step and, on a terminal, the current phase below. Use as a context manager.

    `steps`: last step of the run; `done`: step from which the run resumes.
    """

    def __init__(
        self, run_folder: Path, steps: int, done: int = 0, rank: int = 0, console: Console | None = None
    ) -> None:
        self._folder = run_folder
        self._steps = steps
        self._resumed_from = done
        self._console = (console or Console(highlight=False)) if rank == 0 else Console(quiet=True)
        self._loop_began_s: float | None = None
        self._status = self._console.status("")

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._console.quiet:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the live line; a second call has no effect."""
        self._status.stop()

    def note(self, text: str) -> None:
        LOGGER.info(text)
        self._print(text)

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Show a phase during the `with` body. The first GENERATE or TRAIN starts the clock for the time left."""
        if name in (Phase.GENERATE, Phase.TRAIN) and self._loop_began_s is None:
            self._loop_began_s = time.monotonic()
        # The startup of a run is shown like a phase but is no member of Phase.
        description = Phase[name].description if name in Phase.__members__ else ""
        outer = self._status.status
        self._status.update(Text("  ".join(filter(None, (name, description, detail)))))
        try:
            yield
        finally:
            self._status.update(outer)

    def step(self, step: int, scalars: Mapping[str, float], accuracy: float | None = None) -> None:
        """Print the line of a finished step. `accuracy`: share of correct answers, if known."""
        line = step_line(step, self._steps, scalars, accuracy)
        if self._loop_began_s is not None and step > self._resumed_from:
            step_s = (time.monotonic() - self._loop_began_s) / (step - self._resumed_from)
            line += f"  {duration(step_s * (self._steps - step))} left"
        self.note(line)

    def print_eval(self, step: int, scores: Scores) -> None:
        """Print the scores of the eval sets after `step`; step 0 is before training."""
        self._print(eval_line(step, scores))

    def print_scores(self, title: str, scores: Scores, before: Scores | None = None) -> None:
        """Print a table of each eval set's scores; with `before`, also the earlier scores and the changes."""
        self.stop()
        self._print("", scores_table(title, scores, before), "")

    def finish(self, before: Scores, after: Scores) -> None:
        """Print the scores before and after training, and how to open the curves and the timeline."""
        self.stop()
        if after:
            self.print_scores("Before and after", after, before)
        self._print(f"Curves:   tensorboard --logdir {shlex.quote(str(self._folder / 'tensorboard'))}")
        self._print(f"Timeline: open {self._folder / 'trace.json'} at https://ui.perfetto.dev")

    def _print(self, *items: RenderableType) -> None:
        # soft_wrap keeps long lines of a log in one line.
        for item in items:
            self._console.print(item, markup=False, highlight=False, soft_wrap=isinstance(item, str))


def step_line(step: int, steps: int, scalars: Mapping[str, float], accuracy: float | None) -> str:
    """Format a finished step as one plain line; leave out unknown numbers."""
    parts = [f"step {step}/{steps}"]
    forms = {"reward/mean": "reward {:.3f}", "sft/loss": "loss {:.4f}"}
    parts += [form.format(scalars[name]) for name, form in forms.items() if name in scalars]
    parts += [] if accuracy is None else [f"accuracy {accuracy:.1%}"]
    speeds = ("speed/generate_tokens_per_s", "speed/train_tokens_per_s")
    parts += [f"{scalars[name]:.0f} tokens/s" for name in speeds if name in scalars][:1]
    names = {phase.lower(): metric_name("time/{phase}_s", phase=phase.lower()) for phase in Phase}
    phases = ", ".join(f"{phase} {scalars[name]:.1f}" for phase, name in names.items() if name in scalars)
    if "time/step_s" in scalars:
        parts.append(f"{scalars['time/step_s']:.1f} s" + (f" ({phases})" if phases else ""))
    return "  ".join(parts)


def eval_line(step: int, scores: Scores) -> str:
    """Format an evaluation as one plain line."""
    texts = []
    for name, score in scores.items():
        samples = score.samples
        numbers = list[str]()
        if score.accuracy is not None:
            numbers.append(f"{score.accuracy:.1%} right" + (f" (avg@{samples})" if samples > 1 else ""))
        for kind, by_k in (("pass", score.pass_at), ("maj", score.maj_at)):
            if samples in by_k:
                numbers.append(f"{kind}@{samples} {by_k[samples].value:.1%}")
        texts.append(f"{name} " + ", ".join([*numbers, f"reward {score.reward:.3f}", f"{score.length:.0f} tokens"]))
    return f"eval after step {step}: " + "; ".join(texts)


def scores_table(title: str, scores: Scores, before: Scores | None = None) -> Table:
    """Return a table of each eval set's scores; with `before`, also the earlier scores and the changes."""
    table = Table(title=title, title_justify="left")
    for column in ("eval set", ""):
        table.add_column(column)
    for column in ("score",) if before is None else ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name, score in scores.items():
        for index, (label, old, new, change) in enumerate(score_changes((before or {}).get(name), score)):
            cells = (new,) if before is None else (old, new, change)
            table.add_row("" if index else name, label, *cells)
    return table


def score_changes(before: EvalScore | None, after: EvalScore) -> Iterator[tuple[str, str, str, str]]:
    """Yield label, earlier value, value and change of each known estimate of a score."""
    earlier = dict(_estimates(before)) if before else {}
    for label, estimate in _estimates(after):
        is_share = "@" in label or label == "accuracy"
        form = ".1%" if is_share else {"reward": ".3f", "length (tokens)": ".1f"}.get(label, ".0f")
        old = earlier.get(label)
        change = f"{estimate.value - old.value:+{form}}".replace("%", " points") if old else ""
        yield label, _with_error(old, form) if old else "", _with_error(estimate, form), change


def _estimates(score: EvalScore) -> Iterator[tuple[str, Estimate]]:
    if score.accuracy is not None:
        label = "accuracy" if score.samples == 1 else f"avg@{score.samples}"
        yield label, Estimate(score.accuracy, score.accuracy_error)
    yield from ((f"pass@{k}", estimate) for k, estimate in score.pass_at.items())
    yield from ((f"maj@{k}", estimate) for k, estimate in score.maj_at.items())
    yield "reward", Estimate(score.reward)
    yield "length (tokens)", Estimate(score.length)
    if score.too_long:
        yield f"too long, of {score.problems} problems", Estimate(score.too_long)


def _with_error(estimate: Estimate, form: str) -> str:
    error = "" if estimate.error is None else f" ± {estimate.error:{form}}".removesuffix("%")
    return f"{estimate.value:{form}}{error}"


def duration(seconds: float) -> str:
    """Format a duration: 45 s, 3 min 05 s, 2 h 07 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
