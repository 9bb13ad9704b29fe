from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.data.cursor import Cursor, take

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
