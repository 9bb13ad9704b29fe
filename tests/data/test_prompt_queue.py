import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.data.cursor import Cursor, PromptQueue


def none_skipped(_: int) -> bool:
    return False


@given(st.integers(1, 12), st.booleans(), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=12))
def test_what_is_drawn_ahead_changes_neither_order_nor_position(
    size: int, shuffle: bool, steps: list[tuple[int, int]]
) -> None:
    """A queue that draws ahead, one that does not, and one that begins anew at each saved position: same prompts."""
    ahead, exact = PromptQueue(size, shuffle), PromptQueue(size, shuffle)
    cursor = Cursor(seed=3)
    taken = []
    for count, more in steps:
        resumed = PromptQueue(size, shuffle)
        for queue in (ahead, exact, resumed):
            queue.begin_step(cursor, none_skipped, None)
        ahead.extend(count + more)
        drawn = [[queue[number] for number in range(count)] for queue in (ahead, exact, resumed)]
        taken += drawn[1]
        assert drawn[1] == drawn[2]
        cursor = exact.use_up(count)
        ahead_cursor = ahead.use_up(count)
        if size > sum(map(sum, steps)):  # within the first epoch nothing is deferred
            assert drawn[0] == drawn[1]
            assert ahead_cursor == cursor
        ahead.give_back()
    for start in range(0, len(taken) - size + 1, size):
        assert sorted(taken[start : start + size]) == list(range(size))


def test_skipped_prompts_are_drawn_only_where_nearly_all_are() -> None:
    queue = PromptQueue(6, False)
    queue.begin_step(Cursor(), lambda index: index % 2 == 0, None)
    assert [queue[number] for number in range(5)] == [1, 3, 5, 1, 3]
    queue = PromptQueue(6, False)
    queue.begin_step(Cursor(), lambda index: index != 4, None)
    assert [queue[number] for number in range(4)] == [4, 1, 2, 3]


@pytest.mark.parametrize(("size", "step_size", "ahead"), [(100, 64, 2), (16, 16, 1)])
def test_no_step_has_a_prompt_twice_though_later_ones_are_drawn_ahead(size: int, step_size: int, ahead: int) -> None:
    queue, cursor = PromptQueue(size, True), Cursor(seed=2)
    for _ in range(20):
        queue.begin_step(cursor, none_skipped, step_size)
        queue.extend(step_size * (1 + ahead))
        assert len({queue[number] for number in range(step_size)}) == step_size
        cursor = queue.use_up(step_size)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 8), st.booleans(), st.lists(st.integers(0, 6), max_size=9))
def test_a_resumed_run_draws_what_the_stopped_one_had_drawn_ahead(
    step_size: int, more: int, ahead: int, shuffle: bool, steps: list[int]
) -> None:
    """At every saved position, ends of epochs among them."""
    size = step_size + more
    queue, cursor = PromptQueue(size, shuffle), Cursor(seed=5)
    for count in steps:
        queue.begin_step(cursor, none_skipped, step_size)
        queue.extend(count + ahead)
        resumed = PromptQueue(size, shuffle)
        resumed.begin_step(cursor, none_skipped, step_size)
        assert [resumed[number] for number in range(count + ahead)] == [
            queue[number] for number in range(count + ahead)
        ]
        cursor = queue.use_up(count)
