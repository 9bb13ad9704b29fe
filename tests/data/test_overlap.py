"""Eval problems in the train data are found whatever their case and punctuation, and no others."""

import pytest

from grpo_mp.data.set_checks import overlap_warnings


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
    assert len(list(overlap_warnings(["other", train], {"set": [held_out]}))) == 1


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
    assert not list(overlap_warnings([train], {"set": [held_out]}))


def test_sets_are_counted_apart_and_reported() -> None:
    assert list(overlap_warnings(["a", "b"], {"x": ["A", "b", "c"], "y": ["A"], "z": ["c"]})) == [
        "data.eval x: 2 of 3 problems are also in data.train",
        "data.eval y: 1 of 1 problems are also in data.train",
    ]
