r"""The rewards of GSM8K-like tasks: whether there is a \boxed{} answer, and whether it is right."""

import re
from collections.abc import Sequence
from typing import Literal

from grpo_mp.rewards.answer_reading import Number, Text, read_answer, same_number, split_label, without_name
from grpo_mp.rewards.math_verify_worker import MathVerifier

BoxChoice = Literal["last", "first"]
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # and what is escaped, which counts as none


def boxed_answer(text: str, which: BoxChoice = "last") -> str | None:
    r"""Return the content of the last or first \boxed{...} whose braces balance; None without one, or if blank."""
    starts = [match.end() for match in re.finditer(r"\\f?box(?:ed)?\s*\{", text)]
    closings = _closing_braces(text)
    for start in reversed(starts) if which == "last" else starts:
        if (end := closings.get(start)) is not None:
            return text[start:end].strip() or None
    return None


def answer_reward(response: str, answer: str, verifier: MathVerifier, which: BoxChoice = "last") -> float:
    """Return 1 if the boxed answer (the last or the first) has the right value, else 0."""
    predicted = boxed_answer(response, which)
    return float(predicted is not None and bool(same_answer(answer, predicted, verifier)))


def same_answer(expected: str, predicted: str, verifier: MathVerifier) -> bool | None:
    """Compare numbers by value, words as text, expressions by math-verify; None where that takes too long."""
    if expected.strip() == predicted.strip():
        return True
    left, right = map(read_answer, _without_what_one_adds(expected, predicted))
    if isinstance(left, Number) and isinstance(right, Number):
        return same_number(left, right, verifier.tolerance)
    if isinstance(left, Text) and isinstance(right, Text):
        return left.key == right.key
    if isinstance(left, Text) and left.digits and isinstance(right, Number):
        return left.digits == right.latex
    if left.latex is None or right.latex is None:
        return False
    return verifier.equal(left.latex, right.latex)


def _without_what_one_adds(expected: str, predicted: str) -> tuple[str, str]:
    """Remove a part that only one of two answers has: a choice's letter, the text behind it, or a variable's name."""
    (label, value), (other_label, other_value) = split_label(expected), split_label(predicted)
    if label and other_label:
        return label, other_label
    if label:
        return (label if _is_letter(predicted) else value), predicted
    if other_label:
        return expected, (other_label if _is_letter(expected) else other_value)
    if "=" in expected and "=" not in predicted:
        return without_name(expected), predicted
    if "=" in predicted and "=" not in expected:
        return expected, without_name(predicted)
    return expected, predicted


def _is_letter(answer: str) -> bool:
    reading = read_answer(answer)
    return isinstance(reading, Text) and len(reading.key) == 1


def answer_numbers(responses: Sequence[str], verifier: MathVerifier, which: BoxChoice = "last") -> list[int | None]:
    """Give each response's answer a number: equal answers have the same number; None: no boxed answer.

    An answer gets the number of the first one that it equals. One that cannot be compared in time gets its own.
    """
    answers = [boxed_answer(response, which) for response in responses]
    numbers: dict[str, int] = {}
    distinct: list[str] = []
    for answer in answers:
        if answer is not None and answer not in numbers:
            numbers[answer] = _index_of_equal(answer, distinct, verifier)
            if numbers[answer] == len(distinct):
                distinct.append(answer)
    return [None if answer is None else numbers[answer] for answer in answers]


def _index_of_equal(answer: str, distinct: Sequence[str], verifier: MathVerifier) -> int:
    """Return the index of the first that equals the answer; the length where none does or a comparison times out."""
    for index, other in enumerate(distinct):
        is_same = same_answer(other, answer, verifier)
        if is_same:
            return index
        if is_same is None:
            break
    return len(distinct)


def _closing_braces(text: str) -> dict[int, int]:
    """Return the index of the closing brace by the index behind each opening one; escaped braces do not count."""
    opened, closings = list[int](), dict[int, int]()  # one pass: a response may open thousands that nothing closes
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif match[0] == "}" and opened:
            closings[opened.pop()] = match.start()
    return closings
