"""Where the time and the memory of runs went: by phase and rank, beside what was planned."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from math import isfinite, nan
from statistics import fmean
from typing import Any

from grpo_mp.monitor.curves import PHASES
from grpo_mp.monitor.report.contents import Bar, Lanes, Table
from grpo_mp.monitor.report.curves import titled
from grpo_mp.monitor.run_folder import RunRecords
from grpo_mp.monitor.timeline import Span, covered_ns
from grpo_mp.utils.phases import GIB, WAIT, Phase

NAMES = tuple(phase.upper() for phase in PHASES)
SYNCED = ("SYNC", "CHECK")  # after the update
STEP = tuple(name for name in NAMES if name not in ("SAVE", "EVAL"))
WORK = {phase.value.lower() for phase in Phase if phase.is_work}


def rank_tables(runs: Sequence[RunRecords]) -> tuple[Table, ...]:
    """Return for each run the mean seconds of each phase in a step, on each rank whose trace was read."""
    return tuple(
        Table(
            titled("Seconds of a step on each rank", run, runs),
            ("rank", *PHASES, "waiting"),
            rows=tuple(_rank_row(rank, spans, steps) for rank, spans in run.traces.items()),
            runs=(place,) * len(run.traces),
            note=f"Mean of {len(steps)} steps, a repeated one each time; saves and evaluations are shared among them. "
            "A rank that spends less than the others in a phase waits for them in the next one.",
        )
        for place, run in enumerate(runs)
        if (steps := traced_steps(_trainer(run)))
    )


def traced_steps(spans: Sequence[Span]) -> tuple[tuple[int, int], ...]:
    """Return start and end of each step in a trainer's trace, in nanoseconds; one that did not train is none.

    A step is from its first phase to the end of the first sync and check after its update. What a start syncs and
    checks is of no step, nor what was generated for a step before the run was stopped, and a later start repeated.
    """
    ordered = sorted((span for span in spans if span.name in STEP), key=lambda span: span.start_ns)
    trains = [place for place, span in enumerate(ordered) if span.name == "TRAIN"]
    steps, end = list[tuple[int, int]](), 0
    for last, train, following in zip([-1, *trains], trains, [*trains[1:], len(ordered)], strict=False):
        before, after = ordered[last + 1 : train], ordered[train + 1 : following]
        earliest = max([end, *(span.end_ns for span in before if span.name in SYNCED)])
        begun = [span.start_ns for span in before if span.name not in SYNCED and span.start_ns >= earliest]
        closing = [next((span for span in after if span.name == name), None) for name in SYNCED]
        end = max(span.end_ns for span in (ordered[train], *closing) if span is not None)
        steps.append((min(begun, default=ordered[train].start_ns), end))
    return tuple(steps)


def _trainer(run: RunRecords) -> Sequence[Span]:
    """Return the trace of the first rank that trains."""
    trained = (spans for spans in run.traces.values() if any(span.name == "TRAIN" for span in spans))
    return next(trained, ())


def _rank_row(rank: int, spans: Sequence[Span], steps: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    seconds = (_covered_s(spans, name, steps) / len(steps) for name in (*NAMES, WAIT))
    return (str(rank), *(f"{one:.3g}" for one in seconds))


def _covered_s(spans: Sequence[Span], name: str, steps: Sequence[tuple[int, int]]) -> float:
    """Return the seconds of a phase inside steps; of one between them, since the first step began."""
    inside = steps if name in (*STEP, WAIT) else [(steps[0][0], max((span.end_ns for span in spans), default=0))]
    cut = (part for span in spans if span.name == name for part in _parts(span, inside))
    return covered_ns(cut) / 1e9


def _parts(span: Span, steps: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what of a span is inside steps, which follow each other."""
    for start, end in islice(steps, bisect_right(steps, span.start_ns, key=lambda step: step[1]), None):
        if start >= span.end_ns:
            return
        yield max(start, span.start_ns), min(end, span.end_ns)


def last_steps(runs: Sequence[RunRecords]) -> tuple[Lanes, ...]:
    """Return for each run its last whole step, rank by rank."""
    lanes = (_last_step(run, place, titled("The last step, rank by rank", run, runs)) for place, run in enumerate(runs))
    return tuple(one for one in lanes if one is not None)


def _last_step(run: RunRecords, place: int, title: str) -> Lanes | None:
    steps = traced_steps(_trainer(run))
    if not steps:
        return None
    start, end = steps[-1]
    bars = tuple(
        tuple(
            Bar(NAMES.index(span.name), (span.start_ns - start) / 1e9, (span.end_ns - span.start_ns) / 1e9)
            for span in spans
            if span.name in NAMES and span.end_ns > start and span.start_ns < end
        )
        for spans in run.traces.values()
    )
    note = "Gaps are waiting, moving or overhead."
    return Lanes(title, PHASES, rows=tuple(f"rank {rank}" for rank in run.traces), bars=bars, note=note, run=place)


def plan_tables(runs: Sequence[RunRecords]) -> tuple[Table, ...]:
    """Return for each run that was planned what each phase was to take, beside what it took, and the overhead."""
    return tuple(
        Table(
            titled("Beside the plan", run, runs),
            ("phase", "s, planned", "s, measured"),
            rows=tuple(_time_rows(run)),
            runs=(place,) * (len(run.plan["phases"]) + 2),
            note=_plan_note(run, "mean step; overhead: share of the step outside of the phases that count as work"),
        )
        for place, run in enumerate(runs)
        if run.plan.get("phases")
    )


def memory_tables(runs: Sequence[RunRecords]) -> tuple[Table, ...]:
    """Return for each run that was planned the memory that each phase was to need, beside what it needed."""
    host = ("host GiB of a node, planned", "host GiB of a rank, measured")
    return tuple(
        Table(
            titled("Memory beside the plan", run, runs),
            ("phase", "device GiB of a rank, planned", "measured", *host),
            rows=tuple(_memory_rows(run)),
            runs=(place,) * len(run.plan["phases"]),
            note=_plan_note(run, f"largest rank; a node has {ranks_per_node(run)} ranks"),
        )
        for place, run in enumerate(runs)
        if run.plan.get("phases")
    )


def ranks_per_node(run: RunRecords) -> str:
    """Return how many ranks a node of the plan has."""
    ranks, nodes = run.plan.get("ranks"), run.plan.get("nodes")
    return f"{ranks // nodes}" if ranks and nodes else "some"


def _plan_note(run: RunRecords, measured: str) -> str:
    times = "" if run.plan["step_s"] is not None else " Without times: this machine is another."
    return f"Planned for {run.plan['cluster']}; measured: {measured}.{times}"


def _time_rows(run: RunRecords) -> Iterator[tuple[str, ...]]:
    planned: dict[str, Any] = run.plan["phases"]
    for name, phase in planned.items():
        yield name, _seconds(phase["seconds"]), _mean(run, f"time/{name}_s", "{:.3g}")
    step_s = run.plan["step_s"]
    yield "step", _seconds(step_s), _mean(run, "time/step_s", "{:.3g}")
    work_s = sum(phase["seconds"] or 0.0 for name, phase in planned.items() if name in WORK)
    overhead = "" if not step_s else f"{max(0.0, 1 - work_s / step_s):.1%}"
    yield "overhead", overhead, _mean(run, "time/overhead_share", "{:.1%}")


def _memory_rows(run: RunRecords) -> Iterator[tuple[str, ...]]:
    planned: dict[str, Any] = run.plan["phases"]
    for name, phase in planned.items():
        device, host = (_known(run, f"memory/{name}/{kind}") for kind in ("peak_device_bytes", "host_bytes"))
        measured = (_gib(max(values, default=nan)) for values in (device, host))
        yield name, _gib(phase["device_bytes"]), next(measured), _gib(phase["host_bytes"]), next(measured)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3g}"


def _mean(run: RunRecords, name: str, form: str) -> str:
    values = _known(run, name)
    return form.format(fmean(values)) if values else ""


def _known(run: RunRecords, name: str) -> list[float]:
    return [line[name] for line in run.metrics if name in line and isfinite(line[name])]


def _gib(number: float) -> str:
    return f"{number / GIB:.2f}" if isfinite(number) and number else ""
