"""View of `grpo-mp watch`: the state of a run as tables of the package rich."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_mp.checkpoint.run_state import METRICS, SETTINGS
from grpo_mp.monitor.progress import duration
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.run_folder import (
    MetricLine,
    files_by_step,
    has_processes,
    numbered_files,
    read_metrics,
    read_samples,
    read_settings,
)
from grpo_mp.monitor.timeline import RANK_TRACE, RankPhase, read_phase
from grpo_mp.rollout.engine_load import EngineLoad, read_loads
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.findings import Finding

BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 30
MOST_ROWS, MOST_WARNINGS = 12, 4
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 160, 400
# Pattern of metric names -> (label, format of the values). {} in a label is the second part of the name.
CURVES = {
    "reward/mean": ("reward", "{:.3f}"),
    "rollout/accuracy": ("accuracy", "{:.1%}"),
    "eval/*/accuracy": ("eval {}", "{:.1%}"),
    "sft/loss": ("loss", "{:.3f}"),
    "eval/*/loss": ("loss {}", "{:.3f}"),
    "critic/explained_variance": ("explained", "{:.0%}"),
    "rollout/response_length/mean": ("length", "{:.0f} tokens"),
    "rollout/truncated_ratio": ("truncated", "{:.1%}"),
    "train/entropy": ("entropy", "{:.3f}"),
    "train/kl_loss": ("KL", "{:.2g}"),
    "train/grad_norm": ("gradient", "{:.3g}"),
    "mismatch/logprob_abs_diff/mean": ("mismatch", "{:.2g}"),
    "time/step_s": ("step time", "{:.1f} s"),
    "speed/generate_tokens_per_s": ("generation", "{:.0f} tokens/s"),
}


@dataclass(frozen=True)
class RunState:
    """State of a run at `time_s`. `status`: "not started", "starts", "runs", "ended" (all steps done) or "stopped"."""

    folder: Path
    status: str
    steps: int  # last step of the run; 0 if unknown
    time_s: float  # seconds since the epoch
    metrics: Sequence[MetricLine] = ()
    ranks: Sequence[RankPhase] = ()
    engines: Mapping[int, Sequence[EngineLoad]] = field(default_factory=dict)
    sample_step: int = 0
    samples: Sequence[Mapping[str, Any]] = ()  # samples of `sample_step`
    warnings: Sequence[Finding] = ()

    @property
    def step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def is_running(self) -> bool:
        """Return whether processes of the run are alive, here or on other hosts."""
        return self.status in ("starts", "runs")


def read_state(folder: Path) -> RunState:
    """Read the state of a run from its folder, which may not exist yet."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give the run.folder of a run")
    if not (folder / SETTINGS).is_file():
        return RunState(folder, "not started", 0, time.time())
    metrics = read_metrics(folder / METRICS)
    steps = read_settings(folder).get("run", {}).get("steps", 0)
    status = "ended" if steps and metrics and metrics[-1]["step"] >= steps else "stopped"
    if has_processes(folder):
        status = "runs" if metrics else "starts"
    traces = numbered_files(folder / "trace", RANK_TRACE) if status in ("starts", "runs") else {}
    samples = files_by_step((folder / "samples").glob("step_*.jsonl"))
    sample_step = max(samples, default=0)
    return RunState(
        folder,
        status,
        steps=steps,
        time_s=time.time(),
        metrics=metrics,
        ranks=[read_phase(rank, file) for rank, file in traces.items()],
        engines=read_loads(folder),
        sample_step=sample_step,
        samples=read_samples(samples[sample_step]) if samples else (),
        warnings=find_warnings(metrics),
    )


def frame(state: RunState) -> RenderableType:
    """Return the whole view: the header, and a panel for each table with rows."""
    parts: list[tuple[str, Table]] = [
        ("curves", curves(state.metrics)),
        ("ranks", ranks(state.ranks, state.time_s)),
        ("engines", engines(state)),
        ("warnings", warnings(state)),
        (f"samples of step {state.sample_step}", samples(state.samples)),
    ]
    panels = [
        Panel(part, title=title, title_align="left", border_style="dim") for title, part in parts if part.row_count
    ]
    return Group(header(state), *panels)


def header(state: RunState) -> Text:
    """Return a line with folder, status, step and the time left at the mean step time of the last 20 steps."""
    parts = [state.status]
    if state.status == "not started":
        parts.append("waiting for its settings.yaml")
    if state.steps:
        parts.append(f"step {state.step}/{state.steps}")
    seconds = [line["time/step_s"] for line in state.metrics[-20:] if math.isfinite(line.get("time/step_s", math.nan))]
    if seconds and state.is_running:
        parts.append(f"about {duration(fmean(seconds) * (state.steps - state.step))} left")
    return Text(f"{state.folder}  ", style="bold").append("  ".join(parts), style="not bold cyan")


def curves(metrics: Sequence[MetricLine]) -> Table:
    """Return a table with a sparkline, the last value and the range of each metric in CURVES."""
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
            bars, span = Text(sparkline(values), style="cyan"), Text(f"{low} - {high}", style="dim")
            table.add_row(label.format(name.split("/")[1]), bars, last, span)
    return table


def sparkline(values: Sequence[float], bars: int = NUM_BARS) -> str:
    """Draw values as at most `bars` characters, each for the mean of an equal stretch; blank if none is finite."""
    count = min(bars, len(values))
    stretches = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    finite = [[value for value in stretch if math.isfinite(value)] for stretch in stretches]
    means = [fmean(stretch) if stretch else None for stretch in finite]
    numbers = [mean for mean in means if mean is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else BARS[round((mean - low) * scale)] for mean in means)


def ranks(phases: Sequence[RankPhase], now_s: float) -> Table:
    """Return a table with a row for each phase that ranks are in, the longest first."""
    by_name: dict[str, list[RankPhase]] = {}
    for phase in phases:
        by_name.setdefault(phase.name or "between phases", []).append(phase)
    table = _table("in", "for", "ranks")
    rows = sorted(by_name.items(), key=lambda item: min(phase.since_s for phase in item[1]))
    for name, alike in rows[:MOST_ROWS]:
        longest = max(0.0, now_s - min(phase.since_s for phase in alike))
        table.add_row(Text(name, style="bold"), duration(longest), name_ranges([phase.rank for phase in alike]))
    return table


def name_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as '0-3, 7'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def engines(state: RunState) -> Table:
    """Return a table with the current load of the busiest engines."""
    known = {number: lines[-1] for number, lines in state.engines.items() if lines}
    table = _table("engine", "running", "queued", "cache", "tokens/s", "")
    busiest = sorted(known, key=lambda number: (known[number].works, -(known[number].running or 0)))
    for number in sorted(busiest[:MOST_ROWS]):
        load = known[number]
        columns = [
            (load.running, "{}"),
            (load.queued, "{}"),
            (load.cache_share, "{:.0%}"),
            (load.tokens_per_s, "{:.0f}"),
        ]
        now = ["" if value is None or not state.is_running else form.format(value) for value, form in columns]
        note = f"{duration(state.time_s - load.time_s)} ago" if load.works else load.state
        table.add_row(str(number), *now, Text(note, style="dim"))
    if len(known) > MOST_ROWS:
        table.add_row(f"and {len(known) - MOST_ROWS} more")
    return table


def warnings(state: RunState) -> Table:
    """Return a table of the heaviest warnings with their advice."""
    table = Table.grid(padding=(0, 1))
    for finding in state.warnings[:MOST_WARNINGS]:
        until = f" (until step {finding.last_step})" if finding.last_step < state.step else ""
        table.add_row(Text(finding.sentence + until, style="yellow"))
        table.add_row(Text(f"  {finding.advice}", style="dim"))
    if len(state.warnings) > MOST_WARNINGS:
        table.add_row(f"and {len(state.warnings) - MOST_WARNINGS} more: grpo-mp report {state.folder}")
    return table


def samples(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with the best and the worst answer of a step. Model text is never parsed as markup."""
    ordered = sorted(lines, key=lambda line: -float(line.get("reward") or 0.0))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for line in ordered[:1] + ordered[1:][-1:]:
        table.add_row("asked", _tail(str(line.get("prompt") or ""), PROMPT_CHARACTERS))
        table.add_row(f"{float(line.get('reward') or 0.0):.2f}", _tail(str(line["response"]), RESPONSE_CHARACTERS))
    return table


def _tail(text: str, most: int) -> Text:
    """Return the last `most` characters of a text as one paragraph without control characters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return Text(plain if len(plain) <= most else f"... {plain[-most:]}")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if index == 0 or not column else "right")
    return table
