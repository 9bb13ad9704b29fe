import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.data.prompts import final_answer
from grpo_mp.rewards.math import boxed_answer
from tools.tiny.arithmetic import (
    TEMPLATES,
    Problem,
    Slip,
    add_columns,
    draw_slip,
    make_problems,
    solve,
    subtract_columns,
    vocabulary_words,
    worked_response,
)

KINDS = tuple(TEMPLATES)
NUMBERS = st.one_of(st.integers(0, 99), st.integers(0, 10**6))


def shown_operands(problem: Problem) -> tuple[int, ...]:
    """Return the sorted operands that the question shows."""
    return tuple(sorted(int(text) for text in re.findall(r"\d+", problem.question)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_train_and_eval_share_neither_question_nor_operands(seed: int) -> None:
    train, held_out = make_problems(1500, 200, seed, 40, KINDS)
    assert (len(train), len(held_out)) == (1500, 200)
    questions = {problem.question for problem in train + held_out}
    assert len(questions) == 1700
    assert not {shown_operands(problem) for problem in train} & {shown_operands(problem) for problem in held_out}


def read_columns(working: str) -> tuple[list[int], list[int], list[int]]:
    """Read of each column, 'x+y=total' or 'x-y=digit', the left side's value, the right side and the carried one."""
    pairs = [column.split("=") for column in working.split(" ")]
    terms = [[int(term) for term in re.findall(r"[+-]?\d+", left)] for left, _ in pairs]
    carried = [abs(sum(column[2:])) for column in terms]
    return [sum(column) for column in terms], [int(right) for _, right in pairs], carried


def number_of_columns(values: list[int]) -> int:
    """Return the number that column results spell, the last column with all its digits."""
    *digits, last = values
    return sum(value % 10 * 10**place for place, value in enumerate(digits)) + last * 10 ** len(digits)


@given(NUMBERS, NUMBERS)
def test_addition_by_columns(a: int, b: int) -> None:
    working, result = add_columns(a, b)
    computed, shown, carried = read_columns(working)
    assert computed == shown
    assert number_of_columns(shown) == result == a + b
    assert carried == [0, *(total // 10 for total in shown[:-1])]
    assert all(0 <= total <= 19 for total in shown)


@given(NUMBERS, NUMBERS)
def test_subtraction_by_columns(a: int, b: int) -> None:
    a, b = max(a, b), min(a, b)
    working, result = subtract_columns(a, b)
    computed, shown, borrowed = read_columns(working)
    assert computed == shown
    assert number_of_columns(shown) == result == a - b
    assert all(0 <= digit <= 9 for digit in shown)
    lefts = [int(column.partition("-")[0]) for column in working.split(" ")]
    needed_ten = [left - int(digit) for left, digit in zip(lefts, reversed(str(a)), strict=True)]
    assert set(needed_ten) <= {0, 10}
    assert borrowed == [0, *(ten // 10 for ten in needed_ten[:-1])]


@given(NUMBERS, NUMBERS, st.integers(0, 3), st.sampled_from([-2, -1, 1, 2]))
def test_a_slip_makes_one_column_wrong_and_the_result_follows_it(a: int, b: int, step: int, by: int) -> None:
    a, b = max(a, b), min(a, b)
    for columns in (add_columns, subtract_columns):
        working, result = columns(a, b, Slip(step, by))
        computed, shown, _ = read_columns(working)
        wrong = [place for place, (left, right) in enumerate(zip(computed, shown, strict=True)) if left != right]
        assert number_of_columns(shown) == result
        assert wrong in ([step], []) if step < len(shown) else not wrong
        assert (result == (a + b if columns is add_columns else a - b)) == (not wrong)


def test_columns_by_hand() -> None:
    assert add_columns(18, 34) == ("8+4=12 1+3+1=5", 52)
    assert add_columns(99, 7) == ("9+7=16 9+0+1=10", 106)
    assert subtract_columns(52, 18) == ("12-8=4 5-1-1=3", 34)
    assert subtract_columns(100, 1) == ("10-1=9 10-0-1=9 1-0-1=0", 99)
    assert add_columns(18, 34, Slip(0, -2)) == ("8+4=10 1+3+1=5", 50)
    assert subtract_columns(52, 18, Slip(1, 1)) == ("12-8=4 5-1-1=4", 44)


def test_answers_are_those_of_integer_arithmetic() -> None:
    for problem in make_problems(500, 20, 3, 99, KINDS)[0]:
        a, b, *more = problem.operands
        expected = {"add": a + b, "subtract": a - b, "two_steps": a + b - sum(more)}[problem.kind]
        working, result = solve(problem.kind, problem.operands)
        assert problem.result == result == expected >= 0
        assert problem.answer == f"{working}\n#### {expected}"
        assert worked_response(problem) == f"{working} \\boxed{{{expected}}}"
        assert final_answer(problem.answer) == str(expected) == boxed_answer(worked_response(problem))
        assert shown_operands(problem) == tuple(sorted(problem.operands))


def test_slips_come_in_the_share_asked_for() -> None:
    draw = random.Random(0)
    assert [draw_slip(draw, 0.0) for _ in range(20)] == [None] * 20
    slips = [draw_slip(draw, 0.25) for _ in range(4000)]
    made = [slip for slip in slips if slip]
    assert 0.22 < len(made) / len(slips) < 0.28
    assert {slip.step for slip in made} == {0, 1}
    assert {slip.by for slip in made} == {-2, -1, 1, 2}


def test_vocabulary_words_cover_every_question() -> None:
    words = {
        word
        for problem in make_problems(2000, 10, 0, 99, KINDS)[0]
        for word in re.findall("[A-Za-z]+", problem.question)
    }
    assert words == set(vocabulary_words())
