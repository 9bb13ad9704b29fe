"""Tables of gold answers beside right and wrong ones, in the forms of published data sets and of models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mp.data.prompts import final_answer
from grpo_mp.rewards.math import MathVerifier, answer_reward

HERE = Path(__file__).parent
Triple = tuple[str, str, float]


def table(name: str) -> dict[str, list[Triple]]:
    forms: dict[str, list[Triple]] = {}
    for line in (HERE / name).read_text().splitlines():
        if line.startswith("## "):
            triples = forms.setdefault(line[3:], [])
        elif not line.startswith("# "):
            gold, *columns = line.split(" || ")
            assert len(columns) == 2, line
            for value, answers in zip((1.0, 0.0), columns, strict=True):
                triples += [(gold, answer, value) for answer in answers.split(" ;; ") if answer != "-"]
    return forms


FORMS, LIMITS = table("answers.txt"), table("known_limits.txt")


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier(limit_s=60.0)
    yield verifier
    verifier.close()


def read_otherwise(triples: list[Triple], verifier: MathVerifier) -> list[Triple]:
    return [
        (gold, answer, value)
        for gold, answer, value in triples
        if answer_reward(f"So it is \\boxed{{{answer}}}.", final_answer(gold), verifier) != value
    ]


@pytest.mark.parametrize("form", FORMS)
def test_right_answers_are_right_and_near_misses_wrong(form: str, verifier: MathVerifier) -> None:
    assert read_otherwise(FORMS[form], verifier) == []


@pytest.mark.parametrize("form", LIMITS)
def test_known_limits_are_still_limits(form: str, verifier: MathVerifier) -> None:
    """One that is mended belongs to answers.txt."""
    mended = set(LIMITS[form]) - set(read_otherwise(LIMITS[form], verifier))
    assert mended == set()
