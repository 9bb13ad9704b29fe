"""Where the time of one step went: pure functions over the spans of a timeline."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from grpo_mp.monitor.metrics import fill
from grpo_mp.monitor.timeline import Span

WORK = frozenset({"GENERATE", "LOGPROB", "TRAIN", "SYNC", "CHECK"})
WAIT = "WAIT"  # a span in which the rank only waits for other ranks, inside a phase or between phases


@dataclass(frozen=True)
class StepSummary:
    """Time of one step. `seconds` is by span name; a name's overlapping or nested spans count once."""

    wall_s: float
    seconds: dict[str, float]
    idle_share: float  # share of the wall time inside WAIT spans
    overhead_share: float  # share of the wall time outside every WORK span


def summarise(
    spans: Iterable[Span], start_ns: int, end_ns: int, work: Collection[str] = WORK, wait: str = WAIT
) -> StepSummary:
    """Sum the spans up between `start_ns` and `end_ns`, the bounds of the step on this rank; the rest is cut off."""
    inside = [span for span in spans if span.end_ns > start_ns and span.start_ns < end_ns]
    pieces = [(span.name, max(span.start_ns, start_ns), min(span.end_ns, end_ns)) for span in inside]
    names = sorted({name for name, _, _ in pieces})
    wall_ns = end_ns - start_ns
    seconds = {name: covered_ns((a, b) for piece, a, b in pieces if piece == name) / 1e9 for name in names}
    work_ns = covered_ns((a, b) for name, a, b in pieces if name in work)
    return StepSummary(
        wall_s=wall_ns / 1e9,
        seconds=seconds,
        idle_share=seconds.get(wait, 0.0) * 1e9 / wall_ns if wall_ns else 0.0,
        overhead_share=(wall_ns - work_ns) / wall_ns if wall_ns else 0.0,
    )


def covered_ns(pieces: Iterable[tuple[int, int]]) -> int:
    """Length of the union of (start, end) stretches."""
    total, reached = 0, 0
    for start, end in sorted(pieces):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def over_ranks(summaries: Sequence[StepSummary]) -> StepSummary:
    """One summary of all ranks: the slowest rank's seconds, the mean of the shares. Needs at least one."""
    names = sorted({name for summary in summaries for name in summary.seconds})
    return StepSummary(
        wall_s=max(summary.wall_s for summary in summaries),
        seconds={name: max(summary.seconds.get(name, 0.0) for summary in summaries) for name in names},
        idle_share=sum(summary.idle_share for summary in summaries) / len(summaries),
        overhead_share=sum(summary.overhead_share for summary in summaries) / len(summaries),
    )


def step_scalars(summary: StepSummary) -> dict[str, float]:
    """The summary under its metric names: time/step_s, time/generate_s, ..., time/idle_share, time/overhead_share."""
    phases = {fill("time/{phase}_s", phase=name.lower()): seconds for name, seconds in summary.seconds.items()}
    shares = {"time/idle_share": summary.idle_share, "time/overhead_share": summary.overhead_share}
    return {"time/step_s": summary.wall_s, **phases, **shares}
