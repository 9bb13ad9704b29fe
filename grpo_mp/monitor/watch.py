"""Frames of `grpo-mp watch`: the state of a run folder, drawn with rich."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from grpo_mp.checkpoint.run_state import METRICS, SETTINGS
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.run_folder import (
    MetricLine,
    files_by_step,
    has_processes,
    is_silent,
    numbered_files,
    read_metrics,
    read_samples,
    read_settings,
)
from grpo_mp.monitor.screen import duration
from grpo_mp.monitor.timeline import RANK_TRACE, RankPhase, read_phase
from grpo_mp.rollout.engine_load import EngineLoad, read_loads
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.findings import Finding

BARS = "▁▂▃▄▅▆▇█"
LEAST_BARS, MOST_BARS = 8, 60
MOST_RANKS, MOST_ENGINES, MOST_WARNINGS = 12, 12, 4  # rows
LEAST_ROWS, FRAME = 2, 2  # rows of a part in a low terminal, and of the frame around it
BESIDE_BARS = 64  # columns of a curve's name and numbers, and of frames
STALE_S = 30.0  # age from which an engine's last line is marked as old
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 160, 400
# Patterns of metric names: label, and format of the values.
CURVES = {
    "reward/mean": ("reward", "{:.3f}"),
    "rollout/accuracy": ("accuracy", "{:.1%}"),
    "eval/*/accuracy": ("eval {}", "{:.1%}"),
    "sft/loss": ("loss", "{:.3f}"),
    "eval/*/loss": ("loss {}", "{:.3f}"),
    "critic/value_loss": ("critic's loss", "{:.3g}"),
    "critic/explained_variance": ("explained", "{:.0%}"),
    "rollout/response_length/mean": ("length", "{:.0f} tokens"),
    "rollout/truncated_ratio": ("truncated", "{:.1%}"),
    "train/entropy": ("entropy", "{:.3f}"),
    "train/kl_loss": ("KL", "{:.2g}"),
    "train/grad_norm": ("gradient", "{:.3g}"),
    "mismatch/logprob_abs_diff/mean": ("mismatch", "{:.2g}"),
    "time/step_s": ("step time", "{:.1f} s"),
    "time/idle_share": ("idle", "{:.0%}"),
    "speed/generate_tokens_per_s": ("generation", "{:.0f} tokens/s"),
}


@dataclass(frozen=True)
class RunState:
    """A run at `time_s`.

    `status`: "not started", "starts", "runs", "ended" (all steps are done), "stopped", or "silent" (its processes are
    on other hosts and have written nothing for longer than `monitor.phase_timeout_s`).
    """

    folder: Path
    status: str
    steps: int  # of the whole run; 0 if unknown
    time_s: float
    metrics: Sequence[MetricLine] = ()
    ranks: Sequence[RankPhase] = ()
    engines: Mapping[int, Sequence[EngineLoad]] = field(default_factory=dict)
    sample_step: int = 0
    samples: Sequence[Mapping[str, Any]] = ()  # of that step
    warnings: Sequence[Finding] = ()

    @property
    def step(self) -> int:
        """Return the last step that is done."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def is_running(self) -> bool:
        """Return whether the job's processes are alive, here or on other hosts."""
        return self.status in ("starts", "runs")


def read_state(folder: Path) -> RunState:
    """Read what a run does now; the folder may not exist yet."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give the run.folder of a run")
    if not (folder / SETTINGS).is_file():
        return RunState(folder, "not started", 0, time.time())
    settings, metrics, now_s = read_settings(folder), read_metrics(folder / METRICS), time.time()
    steps = settings.get("run", {}).get("steps", 0)
    limit_s = settings.get("monitor", {}).get("phase_timeout_s", math.inf)

    status = "ended" if steps and metrics and metrics[-1]["step"] >= steps else "stopped"
    if has_processes(folder):
        status = "silent" if is_silent(folder, now_s, limit_s) else "runs" if metrics else "starts"
    traces = numbered_files(folder / "trace", RANK_TRACE) if status in ("starts", "runs", "silent") else {}
    samples = files_by_step((folder / "samples").glob("step_*.jsonl"))
    sample_step = max(samples, default=0)
    return RunState(
        folder,
        status,
        steps=steps,
        time_s=now_s,
        metrics=metrics,
        ranks=[read_phase(rank, file) for rank, file in traces.items()],
        engines=read_loads(folder),
        sample_step=sample_step,
        samples=read_samples(samples[sample_step]) if samples else (),
        warnings=find_warnings(metrics),
    )


@dataclass(frozen=True)
class Frame:
    """Renders a state into the width and height of the console."""

    state: RunState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the header and a panel for each part that fits."""
        state, width = self.state, options.max_width
        top = console.render_lines(header(state), options.update(height=None), pad=False)
        yield Rows(top)

        bars = min(MOST_BARS, max(LEAST_BARS, width - BESIDE_BARS))
        parts: list[tuple[str, RenderableType | None]] = [
            ("curves", curves(state.metrics, bars)),
            ("ranks", ranks(state.ranks, state.time_s)),
            ("engines", engines(state, max(LEAST_BARS, bars - 30))),
            ("warnings", warnings(state)),
            (f"samples of step {state.sample_step}", samples(state.samples)),
        ]
        inside = options.update(width=width - 4, height=None)
        lines = [(title, console.render_lines(part, inside, pad=False)) for title, part in parts if part is not None]
        height = None if options.height is None else options.height - len(top)
        rows = share_rows([len(part) for _, part in lines], height)
        for (title, part), count in zip(lines, rows, strict=True):
            if count:
                yield Panel(Rows(part[:count]), title=title, title_align="left", border_style="dim", width=width)


@dataclass(frozen=True)
class Rows:
    """Lines that are rendered already."""

    lines: Sequence[Sequence[Segment]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines unchanged."""
        for line in self.lines:
            yield from line
            yield Segment.line()


def share_rows(needed: Sequence[int], height: int | None) -> list[int]:
    """Return how many rows each part shows, so that all parts and their frames fit into `height`.

    Each part first gets LEAST_ROWS, or nothing if the height is used up; then earlier parts get what is left.
    """
    if height is None:
        return list(needed)
    shown: list[int] = []
    for rows in needed:
        least = min(rows, LEAST_ROWS)
        shown.append(least if height >= least + FRAME else 0)
        height -= least + FRAME if shown[-1] else 0
    for place, rows in enumerate(needed):
        more = min(rows - shown[place], height) if shown[place] else 0
        shown[place] += more
        height -= more
    return shown


def header(state: RunState) -> Text:
    """Return folder, status, step, and the time left at the mean speed of the last steps."""
    parts = [state.status]
    if state.status == "not started":
        parts.append("waiting for its settings.yaml")
    if state.steps:
        parts.append(f"step {state.step}/{state.steps}")
    seconds = [line["time/step_s"] for line in state.metrics[-20:] if math.isfinite(line.get("time/step_s", math.nan))]
    if seconds and state.is_running:
        parts.append(f"about {duration(fmean(seconds) * (state.steps - state.step))} left")
    text = Text(f"{state.folder}  ", style="bold")
    return text.append("  ".join(parts), style="not bold cyan")


def curves(metrics: Sequence[MetricLine], bars: int) -> Table | None:
    """Return a row for each curve of the run: bars, last value, range."""
    table = _table("", "", "now", "range")
    for pattern, (label, form) in CURVES.items():
        names = dict.fromkeys(name for line in metrics for name in line if fnmatchcase(name, pattern))
        for name in names:
            values = [line[name] for line in metrics if name in line]
            numbers = [value for value in values if math.isfinite(value)]
            if not numbers:
                continue
            last = form.format(values[-1]) if math.isfinite(values[-1]) else "no number"
            low, high = form.format(min(numbers)).partition(" ")[0], form.format(max(numbers))
            bar, span = Text(sparkline(values, bars), style="cyan"), Text(f"{low} - {high}", style="dim")
            table.add_row(label.format(name.split("/")[1]), bar, last, span)
    return table if table.row_count else None


def sparkline(values: Sequence[float | None], bars: int) -> str:
    """Return at most `bars` characters, each the mean of an even stretch of the values; blank for no finite value."""
    count = min(bars, len(values))
    stretches = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    finite = [[value for value in stretch if value is not None and math.isfinite(value)] for stretch in stretches]
    means = [sum(stretch) / len(stretch) if stretch else None for stretch in finite]
    numbers = [mean for mean in means if mean is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else BARS[round((mean - low) * scale)] for mean in means)


def ranks(phases: Sequence[RankPhase], now_s: float) -> Table | None:
    """Return a row for each set of ranks that are in the same phases, the longest wait first."""
    by_name: dict[str, list[RankPhase]] = {}
    for phase in phases:
        by_name.setdefault(phase.name or "between phases", []).append(phase)
    if not by_name:
        return None
    table = _table("in", "for", "in all", "ranks")
    rows = sorted(by_name.items(), key=lambda item: min(phase.since_s for phase in item[1]))
    for name, alike in rows[:MOST_RANKS]:
        longest = max(0.0, now_s - min(phase.since_s for phase in alike))
        outer = max(0.0, now_s - min(phase.outer_since_s for phase in alike))
        numbers = name_ranges([phase.rank for phase in alike])
        table.add_row(Text(name, style="bold"), duration(longest), duration(outer), numbers)
    return table


def name_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as '0-3, 7'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def engines(state: RunState, bars: int) -> Table | None:
    """Return a row for each of the busiest engines: its load now and its speed so far."""
    known = {number: lines for number, lines in state.engines.items() if lines}
    if not known:
        return None
    table = _table("engine", "running", "queued", "cache", "tokens/s", "", "")
    busiest = sorted(known, key=lambda number: (known[number][-1].works, -(known[number][-1].running or 0)))
    for number in sorted(busiest[:MOST_ENGINES]):
        last, age_s = known[number][-1], state.time_s - known[number][-1].time_s
        note = last.state if not last.works else ""
        if last.works and state.is_running and age_s > STALE_S:
            note = f"{duration(age_s)} ago"
        columns = [
            (last.running, "{}"),
            (last.queued, "{}"),
            (last.cache_share, "{:.0%}"),
            (last.tokens_per_s, "{:.0f}"),
        ]
        now = ["" if value is None or not state.is_running else form.format(value) for value, form in columns]
        speeds = sparkline([line.tokens_per_s for line in known[number]], bars)
        table.add_row(str(number), *now, Text(speeds, style="cyan"), Text(note, style="yellow"))
    if len(known) > MOST_ENGINES:
        table.add_row("", *[""] * 4, f"and {len(known) - MOST_ENGINES} more", "")
    return table


def warnings(state: RunState) -> Table | None:
    """Return the heaviest warnings with what to do."""
    if not state.warnings:
        return None
    table = Table.grid(padding=(0, 1))
    for finding in state.warnings[:MOST_WARNINGS]:
        until = f" (until step {finding.last_step})" if finding.last_step < state.step else ""
        table.add_row(Text(finding.sentence + until, style="yellow"))
        table.add_row(Text(f"  {finding.advice}", style="dim"))
    if len(state.warnings) > MOST_WARNINGS:
        table.add_row(f"and {len(state.warnings) - MOST_WARNINGS} more: grpo-mp report {state.folder}")
    return table


def samples(lines: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return the best and the worst answer of a step. Model text is never read as markup."""
    ordered = sorted(lines, key=lambda line: -float(line.get("reward") or 0.0))
    if not ordered:
        return None
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for line in ordered[:1] + ordered[-1:] if len(ordered) > 1 else ordered:
        table.add_row("asked", _tail(str(line.get("prompt") or ""), PROMPT_CHARACTERS))
        table.add_row(f"{float(line.get('reward') or 0.0):.2f}", _tail(str(line["response"]), RESPONSE_CHARACTERS))
    return table


def _tail(text: str, most: int) -> Text:
    """Return the end of a text in one paragraph without control characters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return Text(plain if len(plain) <= most else f"... {plain[-most:]}")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if index == 0 or not column else "right")
    return table
