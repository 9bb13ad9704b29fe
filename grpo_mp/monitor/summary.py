"""Time of one step by phase: pure functions over the spans of a timeline."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_mp.monitor.metrics import metric_name
from grpo_mp.monitor.timeline import Span
from grpo_mp.utils.phases import WAIT, Phase


@dataclass(frozen=True)
class StepSummary:
    """Time of one step. `seconds` is by span name; a name's overlapping or nested spans count once."""

    wall_s: float
    seconds: dict[str, float]
    idle_share: float  # share of the wall time inside WAIT spans
    overhead_share: float  # share of the wall time outside the phases that count as work


def summarize(spans: Iterable[Span], start_ns: int, end_ns: int) -> StepSummary:
    """Sum up the spans between `start_ns` and `end_ns`, the bounds of the step on this rank; the rest is cut off."""
    work = {phase.value for phase in Phase if phase.is_work}
    inside = [span for span in spans if span.end_ns > start_ns and span.start_ns < end_ns]
    intervals = [(span.name, max(span.start_ns, start_ns), min(span.end_ns, end_ns)) for span in inside]
    names = sorted({name for name, _, _ in intervals})
    wall_ns = end_ns - start_ns
    seconds = {
        name: covered_ns((start, end) for span_name, start, end in intervals if span_name == name) / 1e9
        for name in names
    }
    work_ns = covered_ns((start, end) for name, start, end in intervals if name in work)
    return StepSummary(
        wall_s=wall_ns / 1e9,
        seconds=seconds,
        idle_share=seconds.get(WAIT, 0.0) * 1e9 / wall_ns if wall_ns else 0.0,
        overhead_share=(wall_ns - work_ns) / wall_ns if wall_ns else 0.0,
    )


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of (start, end) intervals."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def reduce_over_ranks(summaries: Sequence[StepSummary]) -> StepSummary:
    """Reduce the summaries of all ranks: the slowest rank's seconds, the mean of the shares. Needs at least one."""
    names = sorted({name for summary in summaries for name in summary.seconds})
    return StepSummary(
        wall_s=max(summary.wall_s for summary in summaries),
        seconds={name: max(summary.seconds.get(name, 0.0) for summary in summaries) for name in names},
        idle_share=sum(summary.idle_share for summary in summaries) / len(summaries),
        overhead_share=sum(summary.overhead_share for summary in summaries) / len(summaries),
    )


def step_scalars(summary: StepSummary) -> dict[str, float]:
    """Name the summary's numbers: time/step_s, time/generate_s, ..., time/idle_share, time/overhead_share."""
    phase_seconds = {
        metric_name("time/{phase}_s", phase=name.lower()): seconds for name, seconds in summary.seconds.items()
    }
    shares = {"time/idle_share": summary.idle_share, "time/overhead_share": summary.overhead_share}
    return {"time/step_s": summary.wall_s, **phase_seconds, **shares}
