"""Progress output: live lines on a terminal, plain lines in a log. Only rank 0 prints."""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from grpo_mp.algorithms.evaluation import EvalScore
from grpo_mp.monitor import screen
from grpo_mp.monitor.screen import AnswerPair, View
from grpo_mp.utils.phases import Phase

LOGGER = logging.getLogger(__name__)


class Progress:
    """Prints one line per step, and on a terminal keeps what is happening now below it.

    Use as a context manager around the run. `steps` is the last step of the run, `done` the step it resumes from.
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
        """Stop the live lines. Safe to call twice."""
        self._live.stop()

    def note(self, text: str) -> None:
        """Print one line, such as what is being started."""
        LOGGER.info(text)
        self._print(text)

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Show a phase while the body runs. The first GENERATE or TRAIN starts the estimate of the time left."""
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
        """Print a finished step from its metrics; `accuracy` is the share of right answers, where known."""
        remaining_s, steps_since_start = None, step - self._resumed_from
        if self._loop_began_s is not None and steps_since_start > 0:
            remaining_s = (self._clock() - self._loop_began_s) / steps_since_start * (self._view.steps - step)
        self._view = replace(self._view, done=step, scalars=dict(scalars), accuracy=accuracy, remaining_s=remaining_s)
        self.note(screen.step_line(self._view))

    def print_eval(self, step: int, scores: Mapping[str, EvalScore]) -> None:
        """Print the scores of the eval sets after `step`; 0 is before training."""
        self._print(screen.eval_line(step, scores))

    def print_scores(self, title: str, scores_by_set: Mapping[str, EvalScore]) -> None:
        """Print the table of one evaluation."""
        self.stop()
        self._print("", screen.scores_table(scores_by_set, title), "")

    def finish(
        self, before: Mapping[str, EvalScore], after: Mapping[str, EvalScore], pairs: Sequence[AnswerPair] = ()
    ) -> None:
        """Print the tables of before and after, and the command that opens TensorBoard."""
        self.stop()
        if after:
            self._print("", screen.comparison(before, after))
        if pairs:
            self._print("", screen.answers_table(pairs))
        self._print("", f"Curves:   tensorboard --logdir {shlex.quote(str(self._folder / 'tensorboard'))}")
        self._print(f"Timeline: open {self._folder / 'trace.json'} at https://ui.perfetto.dev")

    def _print(self, *items: RenderableType) -> None:
        # Lines longer than a log's assumed width stay one line.
        for item in items:
            self._console.print(item, markup=False, highlight=False, soft_wrap=isinstance(item, str))

    def _render(self) -> RenderableType:
        return screen.live_view(replace(self._view, phase_s=self._clock() - self._phase_began_s))
