"""Eval problems in the train data are found whatever their case and punctuation, and no others."""

import random
import time

import pytest

from grpo_mp.data.overlap import NGRAM_WORDS, Overlap, find_overlaps, split_words

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("How many apples?", "how many APPLES"),
        ("Tom has 3 eggs.", "Tom  has\n3 eggs"),
        ("a well-known sum", "A well known sum"),
        ("“Ten”, he said", '"Ten" he said!'),
        ("1,000 nuts", "１,000 nuts"),
        ("Let $x$ be", "let x be"),
    ],
)
def test_same_problem_is_exact_overlap(train: str, held_out: str) -> None:
    assert find_overlaps(["other", train], {"set": [held_out]}) == [Overlap("set", 1, exact=1, near=0)]


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("2 + 3", "2 - 3"),
        ("2 - 3", "2 * 3"),
        ("x-1", "x+1"),
        ("3.5 eggs", "35 eggs"),
        ("3.5 eggs", "3 5 eggs"),
        ("Tom has 3 eggs", "Tom has 4 eggs"),
    ],
)
def test_other_problem_is_no_overlap(train: str, held_out: str) -> None:
    assert find_overlaps([train], {"set": [held_out]}) == [Overlap("set", 1, exact=0, near=0)]


def test_near_duplicates_share_thirteen_words_in_a_row() -> None:
    assert len(split_words(LONG)) == NGRAM_WORDS
    held_out = [f"But {LONG.upper()}, and more", LONG.replace("seven", "7"), LONG]
    assert find_overlaps([f"so {LONG}!", LONG], {"set": held_out}) == [Overlap("set", 3, exact=1, near=1)]


def test_sets_are_counted_apart_and_reported() -> None:
    overlaps = find_overlaps(["a", "b", LONG], {"x": ["A", "b", "c"], "y": ["A"], "z": ["c", f"x {LONG}"]})
    assert [overlap.sentence for overlap in overlaps] == [
        "data.eval x: 2 of 3 problems are also in data.train",
        "data.eval y: 1 of 1 problems are also in data.train",
        "data.eval z: 0 of 2 problems are also in data.train; 1 more with 13 consecutive words of a train problem",
    ]


def test_a_large_train_set_is_read_in_seconds() -> None:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(["apples", "eggs", "has", "more", "than", "Tom"], k=60)) for _ in range(5_000)]
    start = time.process_time()
    find_overlaps(texts, {"set": texts[:200]})
    assert time.process_time() - start < 5.0
