import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.data.prompts import final_answer
from grpo_mp.rewards.answer_reading import Number, read_answer
from grpo_mp.rewards.math import MathVerifier, answer_numbers, answer_reward, boxed_answer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.terms import BuiltInTerms
from grpo_mp.utils.types import SampleGroup
from tests.rewards.conftest import hurry


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier(limit_s=60.0)
    yield verifier
    verifier.close()


class NeverCalled(MathVerifier):
    """Fails a test in which a plain number reaches math-verify."""

    def equal(self, expected: str, predicted: str) -> bool:
        raise AssertionError(f"compared {expected} with {predicted}")


def closing_brace(text: str, start: int) -> int | None:
    """The brace that closes the one before `start`, by counting from there."""
    depth = 1
    position = start
    while position < len(text):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        position += 2 if text[position] == "\\" else 1
    return None


@given(st.lists(st.sampled_from(["\\boxed{", "\\fbox {", "\\", "{", "}", "a", "\n"])).map("".join))
def test_a_boxed_answer_ends_where_its_own_braces_balance(text: str) -> None:
    starts = [match.end() for match in re.finditer(r"\\f?box(ed)?\s*\{", text)]
    inside = [text[start:end].strip() or None for start in starts if (end := closing_brace(text, start)) is not None]
    assert boxed_answer(text) == (inside or [None])[-1]
    assert boxed_answer(text, "first") == (inside or [None])[0]


@given(st.decimals(-1000, 1000, places=6), st.decimals("-0.02", "0.02", places=6))
def test_within_the_tolerance_is_right(value: Decimal, off: Decimal) -> None:
    """In exact arithmetic: 0.01, of a number below 1 that share of it, and of an integer nothing."""
    allowed = Decimal("0.01") * min(Decimal(1), abs(value)) if value % 1 else 0
    actual = answer_reward(f"\\boxed{{{value + off:f}}}", f"{value:f}", NeverCalled(1.0))
    assert actual == (abs(off) <= allowed)


def test_which_box_is_a_setting(make_group: Callable[..., SampleGroup]) -> None:
    for box, right in (("last", 1.0), ("first", 0.0)):
        built_in = BuiltInTerms(RewardConfig(answer=1.0, boxed_answer=box), max_response_tokens=8, used=["answer"])
        assert built_in.values["answer"](make_group([r"\boxed{3}, no: \boxed{7}"])) == [right]


@given(
    st.fractions(max_denominator=10**6), st.integers(0, 6), st.sampled_from(["{}", "${}$", r"{} \text{{ cm}}", "{}."])
)
def test_a_number_is_read_in_every_way_to_write_it(value: Fraction, places: int, form: str) -> None:
    """Compared with Python's own formats of numbers."""
    sign = "-" * (value < 0)
    size = abs(value)
    whole, part = divmod(size.numerator, size.denominator)
    rounded = Decimal(size.numerator) / size.denominator
    texts = {
        f"{sign}{size}": value,
        rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}": value,
        f"{sign}{rounded:,.{places}f}": Fraction(f"{sign}{rounded:.{places}f}"),
        f"{sign}{rounded:.{places}e}": Fraction(f"{sign}{rounded:.{places}e}"),
    }
    if part and whole:
        texts[rf"{sign}{whole:,}\frac{{{part}}}{{{size.denominator}}}"] = value
    for text, meant in texts.items():
        reading = read_answer(form.format(text))
        assert isinstance(reading, Number)
        assert reading.value == meant
        assert reading.is_decimal == ("." in text)


@given(
    st.text("0123456789 ,.-+/\\{}()$%^_:eExm~\u00bd\u00b2", max_size=30), st.sampled_from(["{}", r"\frac{{{}}}{{7}}"])
)
def test_any_text_can_be_read_and_a_number_is_written_as_itself(text: str, form: str) -> None:
    reading = read_answer(form.format(text))
    if isinstance(reading, Number):
        again = read_answer(reading.latex)
        assert isinstance(again, Number)
        assert (again.value, again.is_percent) == (reading.value, reading.is_percent)


@pytest.mark.parametrize("number", ["9" * 400, "9" * 5000])
@pytest.mark.parametrize("form", ["{}", "3/{}"])
def test_no_number_is_too_long_for_an_answer(form: str, number: str, verifier: MathVerifier) -> None:
    """What is too long for Python's integers is compared by math-verify, or is wrong."""
    text = form.format(number, number)
    assert answer_reward(f"\\boxed{{{text}}}", "7", verifier) == 0.0


@pytest.mark.parametrize(
    ("answer", "predicted", "right"),
    [
        (r"\sqrt{4}", "2", 1.0),
        ("x+1", "1+x", 1.0),
        ("3.14", r"\pi", 1.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        ("x+1", "x+2", 0.0),
        (r"\frac{\pi}{1000}", "0.00314", 1.0),
        ("7", r"\frac{", 0.0),
    ],
)
def test_expressions_are_compared_by_math_verify(
    answer: str, predicted: str, right: float, verifier: MathVerifier
) -> None:
    assert answer_reward(f"\\boxed{{{predicted}}}", answer, verifier) == right


def test_responses_are_numbered_by_their_answers(verifier: MathVerifier) -> None:
    boxes = ["2", "x+1", "2.0", None, "1/2", "1+x", "0.5", "x+2", "2"]
    responses = ["no box" if box is None else rf"\boxed{{7}} or \boxed{{{box}}}" for box in boxes]
    assert answer_numbers(responses, verifier) == [0, 1, 0, None, 2, 1, 2, 3, 0]
    assert answer_numbers(responses, verifier, "first") == [0, 0, 0, None, 0, 0, 0, 0, 0]


def test_the_child_finds_no_secret_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    verifier = MathVerifier(limit_s=60.0)
    assert verifier.equal("x + 1", "1 + x")
    assert verifier._child
    variables = Path(f"/proc/{verifier._child.process.pid}/environ").read_bytes()
    assert b"PATH=" in variables
    assert b"secret" not in variables
    verifier.close()


def test_an_endless_comparison_times_out_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = MathVerifier(limit_s=60.0)
    hurry(verifier, monkeypatch)
    try:
        assert verifier.equal("x", "x")
        assert verifier.equal("1", "9^{9^{9^{9}}}+1") is None
        assert verifier.equal("x+1", "1+x")
    finally:
        verifier.close()


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


FORMS = table("answers.txt")
LIMITS = table("known_limits.txt")


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
