"""Where the time of runs went, of traces that were written out."""

from collections.abc import Iterator

from grpo_mp.monitor.report.times import last_steps, rank_tables, traced_steps
from grpo_mp.monitor.run_folder import RunRecords
from grpo_mp.monitor.timeline import Span

PHASES = ("GENERATE", "SCORE", "LOGPROB", "TRAIN", "SYNC", "CHECK")


def trace(*phases: tuple[str, float], start_s: float = 0.0) -> tuple[Span, ...]:
    """Return spans one after the other, in seconds; a name in small letters is a gap."""

    def spans() -> Iterator[Span]:
        now = start_s
        for name, seconds in phases:
            if name.isupper():
                yield Span(name, round(now * 1e9), round((now + seconds) * 1e9))
            now += seconds

    return tuple(spans())


def step(train_s: float) -> list[tuple[str, float]]:
    return [("GENERATE", 4.0), ("SCORE", 0.5), ("LOGPROB", 1.0), ("TRAIN", train_s), ("SYNC", 0.5), ("CHECK", 0.25)]


START = [("SYNC", 20.0), ("CHECK", 10.0)]


def seconds(*spans: tuple[Span, ...], lines: int = 3) -> list[dict[str, float]]:
    metrics = tuple({"step": float(number)} for number in range(lines))  # with the line of step 0
    (table,) = rank_tables([RunRecords("run", {}, metrics, {}, {}, traces=dict(enumerate(spans)))])
    return [dict(zip(table.columns[1:], map(float, row[1:]), strict=True)) for row in table.rows]


MEAN = {"generate": 4.0, "score": 0.5, "logprob": 1.0, "train": 3.0, "sync": 0.5, "check": 0.25, "waiting": 0.0}


def test_the_start_and_its_line_of_metrics_are_no_step() -> None:
    two = trace(*START, ("EVAL", 30.0), *step(2.0), *step(4.0), ("SAVE", 6.0), ("EVAL", 8.0))
    assert seconds(two) == [MEAN | {"save": 3.0, "eval": 4.0}]


def test_a_start_after_a_stop_is_no_step_nor_is_what_it_generates_again() -> None:
    first = [*START, *step(2.0), ("GENERATE", 3.0)]
    again = [("gap", 600.0), *START, *step(4.0)]
    assert seconds(trace(*first, *again)) == [MEAN | {"save": 0.0, "eval": 0.0}]
    assert seconds(trace(*START, *step(2.0), *again), lines=9) == [MEAN | {"save": 0.0, "eval": 0.0}]


def test_a_step_that_is_repeated_counts_each_time() -> None:
    runs = trace(*START, *step(2.0), ("gap", 60.0), *START, *step(2.0), *step(5.0))
    assert seconds(runs, lines=2)[0]["train"] == 3.0


def test_waits_count_inside_steps_and_other_ranks_by_the_trainers_steps() -> None:
    trainer = trace(*START, *step(3.0), ("EVAL", 5.0), *step(3.0))
    waits = (Span("WAIT", round(30e9), round(32e9)), Span("WAIT", round(40e9), round(43e9)))  # in GENERATE; in EVAL
    engine = trace(("GENERATE", 60.0))
    own, others = seconds(tuple(sorted((*trainer, *waits), key=lambda span: span.end_ns)), engine)
    assert own == MEAN | {"save": 0.0, "eval": 2.5, "waiting": 1.0}
    assert others["generate"] == 9.25  # all the time of both steps
    assert others["train"] == 0.0


def test_a_step_without_sync_or_check_ends_with_its_update() -> None:
    assert traced_steps(trace(("LOGPROB", 1.0), ("TRAIN", 2.0), ("LOGPROB", 1.0), ("TRAIN", 3.0))) == (
        (0, 3_000_000_000),
        (3_000_000_000, 7_000_000_000),
    )
    assert traced_steps(trace(*START, ("GENERATE", 1.0))) == ()


def test_the_last_step_ends_before_the_start_that_came_after_it() -> None:
    spans = trace(*START, *step(2.0), ("gap", 60.0), *START)
    (lanes,) = last_steps([RunRecords("run", {}, (), {}, {}, traces={0: spans})])
    assert [bar.length for bar in lanes.bars[0]] == [4.0, 0.5, 1.0, 2.0, 0.5, 0.25]
