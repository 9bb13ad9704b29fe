import random

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mp.batching.microbatches import MicroBatchSchedule, plan_microbatches


def check_schedule(
    schedule: MicroBatchSchedule, lengths: list[int], ranks: int, capacity: int, align: int, multiple: int
) -> None:
    plans = [plan for rank in schedule.ranks for plan in rank]
    assert len(schedule.ranks) == ranks
    assert {len(rank) for rank in schedule.ranks} == {schedule.microbatches}
    assert schedule.microbatches % multiple == 0
    assert schedule.microbatches >= 1
    assert sorted(sample for plan in plans for sample in plan.samples) == list(range(len(lengths)))
    for plan in plans:
        for sample, padded in zip(plan.samples, plan.lengths, strict=True):
            assert padded % align == 0
            assert 0 <= padded - lengths[sample] < align
        assert plan.tokens <= capacity or len(plan.samples) == 1


@given(
    st.lists(st.integers(1, 60), max_size=40),
    st.integers(1, 5),
    st.integers(1, 100),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.01, 1.0]),
)
@settings(max_examples=500)
def test_every_plan_is_legal_and_deterministic(
    lengths: list[int], ranks: int, capacity: int, align: int, multiple: int, quadratic: float
) -> None:
    costs = [length + quadratic * length**2 for length in lengths]
    schedule = plan_microbatches(lengths, ranks, capacity, align, multiple, costs)
    check_schedule(schedule, lengths, ranks, capacity, align, multiple)
    assert schedule == plan_microbatches(tuple(lengths), ranks, capacity, align, multiple, costs)


def test_long_tailed_lengths_balance_over_ranks_and_microbatches() -> None:
    draw = random.Random(0)
    lengths = [min(8192, 16 + int(draw.lognormvariate(6, 1))) for _ in range(1024)]
    schedule = plan_microbatches(lengths, 8, 16384, 16, multiple=2)
    totals = [sum(plan.tokens for plan in rank) for rank in schedule.ranks]
    assert max(totals) / (sum(totals) / 8) < 1.01
    for k in range(schedule.microbatches):
        together = [rank[k].tokens for rank in schedule.ranks]
        assert max(together) / (sum(together) / 8) < 1.02
