"""The order of prompts: epochs, seeds, prompts that are skipped or drawn ahead."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.data.cursor import Cursor, PromptQueue, take

SIZES = st.integers(1, 40)
COUNTS = st.lists(st.integers(0, 60), max_size=12)


def take_all(cursor: Cursor, size: int, counts: list[int], shuffle: bool) -> list[tuple[int, ...]]:
    takes = []
    for count in counts:
        indices, cursor = take(cursor, size, count, shuffle)
        takes.append(indices)
    return takes


@given(SIZES, COUNTS, st.integers(-5, 2**70), st.booleans())
def test_takes_have_no_repeats_and_epochs_hold_every_prompt_once(
    size: int, counts: list[int], seed: int, shuffle: bool
) -> None:
    takes = take_all(Cursor(seed=seed), size, counts, shuffle)
    for indices, count in zip(takes, counts, strict=True):
        assert len(indices) == count
        assert count > size or len(set(indices)) == count
    stream = [index for indices in takes for index in indices]
    for start in range(0, len(stream) - size + 1, size):
        assert Counter(stream[start : start + size]) == Counter(range(size))


def test_without_shuffle_prompts_come_in_file_order() -> None:
    assert take_all(Cursor(), 5, [3, 3, 4], False) == [(0, 1, 2), (3, 4, 0), (1, 2, 3, 4)]


def test_epochs_and_seeds_differ() -> None:
    first, cursor = take(Cursor(seed=1), 50, 50, True)
    second, _ = take(cursor, 50, 50, True)
    other, _ = take(Cursor(seed=2), 50, 50, True)
    assert len({first, second, other, tuple(range(50))}) == 4


def test_every_position_is_equally_likely_for_a_prompt() -> None:
    places = Counter(take(Cursor(seed=seed), 5, 5, True)[0].index(0) for seed in range(2000))
    assert all(300 < places[place] < 500 for place in range(5))


def none_skipped(_: int) -> bool:
    return False


def test_skipped_prompts_are_drawn_only_where_nearly_all_are() -> None:
    queue = PromptQueue(6, False)
    queue.begin_step(Cursor(), lambda index: index % 2 == 0, None)
    assert [queue[number] for number in range(5)] == [1, 3, 5, 1, 3]
    queue = PromptQueue(6, False)
    queue.begin_step(Cursor(), lambda index: index != 4, None)
    assert [queue[number] for number in range(4)] == [4, 1, 2, 3]


@pytest.mark.parametrize(("size", "step_size", "ahead"), [(100, 64, 2), (16, 16, 1)])
def test_no_step_has_a_prompt_twice_though_later_ones_are_drawn_ahead(size: int, step_size: int, ahead: int) -> None:
    queue = PromptQueue(size, True)
    cursor = Cursor(seed=2)
    for _ in range(20):
        queue.begin_step(cursor, none_skipped, step_size)
        queue.extend(step_size * (1 + ahead))
        assert len({queue[number] for number in range(step_size)}) == step_size
        cursor = queue.use_up(step_size)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=30))
def test_prompts_do_not_depend_on_how_far_ahead_they_were_drawn(steps: list[tuple[int, int]]) -> None:
    """Over the ends of epochs, too."""
    early = PromptQueue(9, True)
    late = PromptQueue(9, True)
    cursors = [Cursor(seed=4)] * 2
    for count, more in steps:
        for queue, cursor in zip((early, late), cursors, strict=True):
            queue.begin_step(cursor, none_skipped, 4)
        early.extend(count + more)
        assert [early[number] for number in range(count)] == [late[number] for number in range(count)]
        cursors = [queue.use_up(count) for queue in (early, late)]


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 8), st.booleans(), st.lists(st.integers(0, 6), max_size=9))
def test_a_resumed_run_draws_what_the_stopped_one_had_drawn_ahead(
    step_size: int, more: int, ahead: int, shuffle: bool, steps: list[int]
) -> None:
    """At every saved position, ends of epochs among them."""
    size = step_size + more
    queue = PromptQueue(size, shuffle)
    cursor = Cursor(seed=5)
    for count in steps:
        queue.begin_step(cursor, none_skipped, step_size)
        queue.extend(count + ahead)
        resumed = PromptQueue(size, shuffle)
        resumed.begin_step(cursor, none_skipped, step_size)
        assert [resumed[number] for number in range(count + ahead)] == [
            queue[number] for number in range(count + ahead)
        ]
        cursor = queue.use_up(count)
