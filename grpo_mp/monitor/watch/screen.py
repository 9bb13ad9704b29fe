"""A frame of `grpo-mp watch`: pure functions from the state of a run to rich's tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from grpo_mp.monitor.rules import MetricLine
from grpo_mp.monitor.screen import duration
from grpo_mp.monitor.watch.state import RankPhase, RunState
from grpo_mp.rollout.engine_load import EngineLoad

BARS = "▁▂▃▄▅▆▇█"
LEAST_BARS, MOST_BARS = 8, 60
MOST_RANKS, MOST_ENGINES, MOST_WARNINGS = 12, 12, 4  # rows
LEAST_ROWS, FRAME = 2, 2  # of a part in a low terminal: its own, and those of the frame around it
BESIDE_BARS = 64  # columns of a curve's name and numbers, and of frames
STALE_S = 30.0  # an engine's last line that is older is shown as old
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 160, 400
# Names of metrics with what they are called here, and how their values are written.
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
class Frame:
    """Renders a state into the width and height that there are."""

    state: RunState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts, which take the width of the terminal, and its height where there is one."""
        state, width = self.state, options.max_width
        top = console.render_lines(header(state), options.update(height=None), pad=False)
        yield Rows(top)
        bars = min(MOST_BARS, max(LEAST_BARS, width - BESIDE_BARS))
        parts: list[tuple[str, RenderableType | None]] = [
            ("curves", curves(state.metrics, bars)),
            ("ranks", ranks(state.ranks, state.time_s)),
            ("engines", engines(state.engines, state.time_s, max(LEAST_BARS, bars - 30), state.goes_on)),
            ("warnings", warnings(state)),
            (f"samples of step {state.sample_step}", samples(state.samples)),
        ]
        inside = options.update(width=width - 4, height=None)
        lines = [(title, console.render_lines(part, inside, pad=False)) for title, part in parts if part is not None]
        height = None if options.height is None else options.height - len(top)
        rows = share_rows([len(of_part) for _, of_part in lines], height)
        for (title, of_part), count in zip(lines, rows, strict=True):
            if count:
                yield Panel(Rows(of_part[:count]), title=title, title_align="left", border_style="dim", width=width)


@dataclass(frozen=True)
class Rows:
    """Lines that are rendered already."""

    lines: Sequence[Sequence[Segment]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines as they are."""
        for line in self.lines:
            yield from line
            yield Segment.line()


def share_rows(needed: Sequence[int], height: int | None) -> list[int]:
    """Return how many rows each part shows so that all, with a frame around each, are at most `height` high.

    Each has at first LEAST_ROWS or what it needs; the first parts get more of what is left, the last have none where
    even that is too much.
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
    """Return the run, how far it is, and what its time left is at the mean time of its last steps."""
    parts = [state.status]
    if state.status == "not started":
        parts.append("waiting for its settings.yaml")
    if state.steps:
        parts.append(f"step {state.step}/{state.steps}")
    seconds = [float(line["time/step_s"] or 0) for line in state.metrics[-20:] if "time/step_s" in line]
    if seconds and state.goes_on:
        parts.append(f"about {duration(sum(seconds) / len(seconds) * (state.steps - state.step))} left")
    text = Text(f"{state.folder}  ", style="bold")
    return text.append("  ".join(parts), style="not bold cyan")


def curves(metrics: Sequence[MetricLine], bars: int) -> Table | None:
    """Return a line for each curve that the run has: its bars, the least and largest value, and the last."""
    table = _table("", "", "now", "range")
    for pattern, (label, form) in CURVES.items():
        names = dict.fromkeys(name for line in metrics for name in line if fnmatchcase(name, pattern))
        for name in names:
            values = [line[name] for line in metrics if name in line]
            numbers = [value for value in values if value is not None]
            if not numbers:
                continue
            shown = label.format(name.split("/")[1])
            last = "no number" if values[-1] is None else form.format(values[-1])
            low, high = form.format(min(numbers)).partition(" ")[0], form.format(max(numbers))
            table.add_row(
                shown, Text(sparkline(values, bars), style="cyan"), last, Text(f"{low} - {high}", style="dim")
            )
    return table if table.row_count else None


def sparkline(values: Sequence[float | None], bars: int) -> str:
    """Return values as at most so many characters: each is the mean of an even stretch; a stretch of none is blank."""
    count = min(bars, len(values))
    stretches = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    means = [_mean(value for value in stretch if value is not None and math.isfinite(value)) for stretch in stretches]
    numbers = [mean for mean in means if mean is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else BARS[round((mean - low) * scale)] for mean in means)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def ranks(phases: Sequence[RankPhase], now_s: float) -> Table | None:
    """Return a row for all ranks that are in the same phases, the longest in it first."""
    by_name: dict[str, list[RankPhase]] = {}
    for phase in phases:
        by_name.setdefault(phase.name or "between phases", []).append(phase)
    if not by_name:
        return None
    table = _table("in", "for", "in all", "ranks")
    rows = sorted(by_name.items(), key=lambda item: min(phase.since_s for phase in item[1]))
    for name, those in rows[:MOST_RANKS]:
        longest = max(0.0, now_s - min(phase.since_s for phase in those))
        outer = max(0.0, now_s - min(phase.outer_since_s for phase in those))
        numbers = name_ranges([phase.rank for phase in those])
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


def engines(loads: Mapping[int, Sequence[EngineLoad]], now_s: float, bars: int, goes_on: bool) -> Table | None:
    """Return a row for each engine: what it does now and its speed so far; at most the MOST_ENGINES busiest."""
    known = {number: lines for number, lines in loads.items() if lines}
    if not known:
        return None
    table = _table("engine", "running", "queued", "cache", "tokens/s", "", "")
    busiest = sorted(known, key=lambda number: (known[number][-1].works, -(known[number][-1].running or 0)))
    for number in sorted(busiest[:MOST_ENGINES]):
        lines, last = known[number], known[number][-1]
        age_s = now_s - last.time_s
        note = last.state if not last.works else f"{duration(age_s)} ago" if goes_on and age_s > STALE_S else ""
        now = [
            _number(value if goes_on else None, form)
            for value, form in (
                *((last.running, "{}"), (last.queued, "{}")),
                *((last.cache_share, "{:.0%}"), (last.tokens_per_s, "{:.0f}")),
            )
        ]
        speeds = [line.tokens_per_s for line in lines]
        table.add_row(
            str(number),
            *now,
            Text(sparkline(speeds, bars), style="cyan"),
            Text(note, style="yellow"),
        )
    if len(known) > MOST_ENGINES:
        table.add_row("", *[""] * 4, f"and {len(known) - MOST_ENGINES} more", "")
    return table


def warnings(state: RunState) -> Table | None:
    """Return the heaviest warnings with what to do."""
    if not state.warnings:
        return None
    table = Table.grid(padding=(0, 1))
    for finding in state.warnings[:MOST_WARNINGS]:
        table.add_row(Text(finding.sentence, style="yellow"))
        table.add_row(Text(f"  {finding.advice}", style="dim"))
    if len(state.warnings) > MOST_WARNINGS:
        table.add_row(f"and {len(state.warnings) - MOST_WARNINGS} more: grpo-mp doctor run {state.folder}")
    return table


def samples(lines: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return the best and the worst answer of the last step that has some. Model text is never read as markup."""
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
    """Return the end of a text, which says most, in one paragraph without control characters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return Text(plain if len(plain) <= most else f"... {plain[-most:]}")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if index == 0 or not column else "right")
    return table
