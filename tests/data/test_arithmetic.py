import json
import re
from pathlib import Path

import pytest

from grpo_mp.data.arithmetic import (
    TEMPLATES,
    Problem,
    make_problems,
    vocabulary_words,
    worked_response,
    write_jsonl,
)
from grpo_mp.data.prompts import final_answer
from grpo_mp.errors import UserError
from grpo_mp.rewards.math import last_boxed

KINDS = tuple(TEMPLATES)


def numbers(problem: Problem) -> tuple[int, ...]:
    """The operands as the question shows them, in no order."""
    return tuple(sorted(int(text) for text in re.findall(r"\d+", problem.question)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_train_and_eval_share_neither_question_nor_operands(seed: int) -> None:
    train, held_out = make_problems(1500, 200, seed, 40, KINDS)
    assert (len(train), len(held_out)) == (1500, 200)
    questions = {problem.question for problem in train + held_out}
    assert len(questions) == 1700
    assert not {numbers(problem) for problem in train} & {numbers(problem) for problem in held_out}


def test_the_working_holds_and_ends_in_the_result() -> None:
    for problem in make_problems(500, 20, 3, 99, KINDS)[0]:
        for left, right in (part.split("=") for part in problem.working.split(" ")):
            assert sum(int(term) for term in re.findall(r"[+-]?\d+", left)) == int(right)
        assert int(right) == problem.result >= 0
        assert final_answer(problem.answer) == str(problem.result) == last_boxed(worked_response(problem))
        assert numbers(problem) == tuple(sorted(problem.operands))


def test_questions_are_short_and_every_template_is_used() -> None:
    train, _ = make_problems(3000, 100, 4, 99, KINDS)
    assert all(40 <= len(problem.question) <= 80 for problem in train)
    shapes = {re.sub(r"\d+|[A-Z][a-z]{2}\b|(apple|book|coin|pen|egg|card)s", "_", p.question) for p in train}
    assert len(shapes) == sum(len(texts) for texts in TEMPLATES.values())


def test_seeds_repeat_and_differ() -> None:
    assert make_problems(50, 10, 7, 30) == make_problems(50, 10, 7, 30)
    assert make_problems(50, 10, 7, 30) != make_problems(50, 10, 8, 30)


def test_too_many_problems_or_an_unknown_kind() -> None:
    with pytest.raises(UserError, match="operands up to 2 gave only"):
        make_problems(1000, 10, 0, 2)
    with pytest.raises(UserError, match="unknown kind"):
        make_problems(1, 1, 0, 9, ("divide",))


def test_rows_are_gsm8k_s(tmp_path: Path) -> None:
    train, _ = make_problems(5, 0, 0, 9)
    write_jsonl(train, tmp_path / "new" / "train.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "new" / "train.jsonl").read_text().splitlines()]
    assert rows == [{"question": problem.question, "answer": problem.answer} for problem in train]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["train.jsonl"]


def test_vocabulary_words_cover_every_question() -> None:
    words = {
        word
        for problem in make_problems(2000, 10, 0, 99, KINDS)[0]
        for word in re.findall("[A-Za-z]+", problem.question)
    }
    assert words == set(vocabulary_words())
