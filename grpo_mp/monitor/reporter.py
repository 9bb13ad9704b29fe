"""Writes the plan and the report of a run into its folder, by processes beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_mp.monitor.side_process import LIMIT_S, NICENESS, SideProcess

PLAN, REPORT = "plan.json", "report.html"


class Reporter:
    """Starts what `monitor.report_every` asks for; `every` is None where this rank is to write nothing."""

    def __init__(self, run_folder: Path, every: int | None, note: Callable[[str], None]) -> None:
        """Take the run's folder, and what shows a failure."""
        self._folder, self._every, self._note = run_folder, every, note
        logs = run_folder / "logs"
        self._plan, self._report = (SideProcess(name, logs / f"{name}.log") for name in ("plan", "report"))

    def begin(self, plan_arguments: Sequence[str]) -> None:
        """Plan the run: `plan_arguments` say for which machines."""
        if self._every is not None:
            settings, file = str(self._folder / "settings.yaml"), str(self._folder / PLAN)
            self._show(self._plan.start(["plan", settings, *plan_arguments, "--json", file]))

    def step(self, step: int) -> None:
        """Write the report anew where it is due after a step, unless the last one is still being written."""
        if self._every and step % self._every == 0:
            self._begin_report()

    def end(self) -> None:
        """Begin the report of all steps."""
        if self._every is not None:
            self._show(self._report.finish())
            self._begin_report(niceness=0)  # the run waits for it

    def finish(self, limit_s: float = LIMIT_S) -> None:
        """Wait for what is being written, at most `limit_s` for each."""
        for process in (self._plan, self._report):
            self._show(process.finish(limit_s))

    def _begin_report(self, niceness: int = NICENESS) -> None:
        self._show(self._report.start(["report", str(self._folder)], niceness))

    def _show(self, text: str | None) -> None:
        if text:
            self._note(f"warning: {text}")
