"""View of `grpo-mp watch`: the state of a run as tables of the package rich."""

import math
import time
from collections.abc import Mapping, Sequence
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
from grpo_mp.monitor.run_folder import MetricLine, files_by_step, read_metrics, read_samples, read_settings
from grpo_mp.utils.findings import Finding

BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 30
MOST_WARNINGS = 4
MOST_CHARACTERS = 400  # of a prompt or an answer
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


def frame(folder: Path) -> RenderableType:
    """Return the view of a run folder, which may not exist yet: a header, and a panel for each table with rows."""
    if not (folder / SETTINGS).is_file():
        return Text(f"{folder}: waiting for its {SETTINGS}")
    metrics = read_metrics(folder / METRICS)
    files = files_by_step((folder / "samples").glob("step_*.jsonl"))
    last = max(files, default=0)
    tables = {
        "curves": curves(metrics),
        "warnings": warnings(find_warnings(metrics)),
        f"samples of step {last}": samples(read_samples(files[last]) if files else ()),
    }
    panels = [
        Panel(table, title=title, title_align="left", border_style="dim")
        for title, table in tables.items()
        if table.row_count
    ]
    return Group(header(folder, metrics), *panels)


def header(folder: Path, metrics: Sequence[MetricLine]) -> Text:
    """Return a line with folder, steps, time since the last step, and the time left at the mean step time."""
    steps = read_settings(folder).get("run", {}).get("steps", 0)
    step = int(metrics[-1]["step"]) if metrics else 0
    parts = [f"step {step}/{steps}"]
    if metrics and step < steps:
        parts.append(f"{duration(time.time() - (folder / METRICS).stat().st_mtime)} since the last step")
        seconds = [line.get("time/step_s", math.nan) for line in metrics[-20:]]
        if known := list(filter(math.isfinite, seconds)):
            parts.append(f"about {duration(fmean(known) * (steps - step))} left")
    return Text(f"{folder}  ", style="bold").append("  ".join(parts), style="not bold cyan")


def curves(metrics: Sequence[MetricLine]) -> Table:
    """Return a table with a sparkline, the last value and the range of each metric in CURVES."""
    table = Table("", "", "now", "range", box=None, padding=(0, 1), header_style="dim")
    for pattern, (label, form) in CURVES.items():
        names = dict.fromkeys(name for line in metrics for name in line if fnmatchcase(name, pattern))
        for name in names:
            values = [line[name] for line in metrics if name in line]
            numbers = list(filter(math.isfinite, values))
            if not numbers:
                continue
            last = form.format(values[-1]) if math.isfinite(values[-1]) else "no number"
            span = f"{form.format(min(numbers)).partition(' ')[0]} - {form.format(max(numbers))}"
            bars = Text(sparkline(values), style="cyan")
            table.add_row(label.format(name.split("/")[1]), bars, last, Text(span, style="dim"))
    return table


def sparkline(values: Sequence[float], bars: int = NUM_BARS) -> str:
    """Draw values as at most `bars` characters, each for the mean of an equal stretch; blank if none is finite."""
    count = min(bars, len(values))
    stretches = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    finite = [list(filter(math.isfinite, stretch)) for stretch in stretches]
    means = [fmean(stretch) if stretch else None for stretch in finite]
    numbers = [mean for mean in means if mean is not None]
    low = min(numbers, default=0.0)
    high = max(numbers, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else BARS[round((mean - low) * scale)] for mean in means)


def warnings(findings: Sequence[Finding]) -> Table:
    """Return a table of the heaviest warnings with their advice."""
    table = Table.grid(padding=(0, 1))
    for finding in findings[:MOST_WARNINGS]:
        table.add_row(Text(f"{finding.sentence} ({finding.where})", style="yellow"))
        table.add_row(Text(f"  {finding.advice}", style="dim"))
    if len(findings) > MOST_WARNINGS:
        table.add_row(f"and {len(findings) - MOST_WARNINGS} more: grpo-mp report")
    return table


def samples(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with the best and the worst answer of a step. Model text is never parsed as markup."""
    ordered = sorted(lines, key=lambda line: -float(line.get("reward") or 0.0))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for line in ordered[:1] + ordered[1:][-1:]:
        table.add_row("asked", _end_of(str(line.get("prompt") or "")))
        table.add_row(f"{float(line.get('reward') or 0.0):.2f}", _end_of(str(line["response"])))
    return table


def _end_of(text: str) -> Text:
    """Return the end of a text as one paragraph without control characters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return Text(plain if len(plain) <= MOST_CHARACTERS else f"... {plain[-MOST_CHARACTERS:]}")
