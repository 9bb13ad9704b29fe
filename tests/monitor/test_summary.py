"""Step summaries against a count of single nanoseconds."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.monitor.timeline import Span, StepSummary, reduce_over_ranks, summarize

NAMES = ("GENERATE", "SCORE", "TRAIN", "WAIT")
SPANS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 60), st.integers(0, 30)).map(
        lambda drawn: Span(drawn[0], drawn[1], drawn[1] + drawn[2])
    ),
    max_size=8,
)


@given(SPANS, st.integers(0, 40), st.integers(1, 40))
def test_summary_equals_counting_each_nanosecond(spans: list[Span], start: int, wall: int) -> None:
    inside = {
        name: {t for span in spans if span.name == name for t in range(span.start_ns, span.end_ns)}
        & set(range(start, start + wall))
        for name in NAMES
    }
    summary = summarize(spans, start, start + wall)
    assert summary.wall_s == wall / 1e9
    for name in NAMES:
        assert round(summary.seconds.get(name, 0.0) * 1e9) == len(inside[name])
    # Shares of at most 1, of two and three operations: each rounds by 2^-53 of its result.
    busy = len(inside["GENERATE"] | inside["TRAIN"])
    waiting = len(inside["WAIT"])
    assert abs(Fraction(summary.overhead_share) - Fraction(wall - busy, wall)) <= Fraction(2, 2**53)
    assert abs(Fraction(summary.idle_share) - Fraction(waiting, wall)) <= Fraction(3, 2**53) * (1 + Fraction(1, 2**50))


def test_the_slowest_rank_s_seconds_and_the_mean_shares() -> None:
    first = StepSummary(2.0, {"TRAIN": 1.0}, idle_share=0.5, overhead_share=0.1)
    second = StepSummary(3.0, {"TRAIN": 0.5, "SYNC": 0.2}, idle_share=0.0, overhead_share=0.3)
    reduced = reduce_over_ranks([first, second])
    assert (reduced.wall_s, reduced.seconds) == (3.0, {"SYNC": 0.2, "TRAIN": 1.0})
    assert reduced.idle_share == pytest.approx(0.25)
    assert reduced.overhead_share == pytest.approx(0.2)
