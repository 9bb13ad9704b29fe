r"""Math rewards: whether a response has a \boxed{} answer, and whether that answer is right."""

import re
from collections.abc import Sequence
from typing import Literal

from grpo_mp.rewards.answer_reading import Number, Text, read_answer, same_number, split_label, without_name
from grpo_mp.rewards.math_verify_worker import MathVerifier

BoxChoice = Literal["last", "first"]
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # also matches escaped characters, so that escaped braces are skipped


def boxed_answer(text: str, which: BoxChoice = "last") -> str | None:
    r"""Return the content of the last or first \boxed{...} with balanced braces; None without one, or if blank."""
    starts = [match.end() for match in re.finditer(r"\\f?box(?:ed)?\s*\{", text)]
    closings = _closing_braces(text)
    for start in reversed(starts) if which == "last" else starts:
        if (end := closings.get(start)) is not None:
            return text[start:end].strip() or None
    return None


def answer_reward(response: str, answer: str, verifier: MathVerifier, which: BoxChoice = "last") -> float:
    """Return 1 if the last or first boxed answer (`which`) equals the expected answer, else 0."""
    predicted = boxed_answer(response, which)
    return float(predicted is not None and bool(same_answer(answer, predicted, verifier)))


def same_answer(expected: str, predicted: str, verifier: MathVerifier) -> bool | None:
    """Return whether two answers are equal; None if math-verify times out.

    Numbers are compared by value, words as text, and expressions by math-verify.
    """
    if expected.strip() == predicted.strip():
        return True
    left, right = map(read_answer, _without_what_one_adds(expected, predicted))
    if isinstance(left, Number) and isinstance(right, Number):
        return same_number(left, right)
    if isinstance(left, Text) and isinstance(right, Text):
        return left.key == right.key
    if isinstance(left, Text) and left.digits and isinstance(right, Number):
        return left.digits == right.latex
    if left.latex is None or right.latex is None:
        return False
    return verifier.equal(left.latex, right.latex)


def _without_what_one_adds(expected: str, predicted: str) -> tuple[str, str]:
    """Remove a part that only one answer has: a choice's letter, the text after the letter, or a variable's name."""
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
    """Return the number of each response's boxed answer, equal for equal answers; None without a boxed answer.

    An answer gets the number of the first answer that it equals, else a new number, also if a comparison times out.
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
    """Return the index of the first equal answer in `distinct`; len(distinct) if none is equal, or at a timeout."""
    for index, other in enumerate(distinct):
        is_same = same_answer(other, answer, verifier)
        if is_same:
            return index
        if is_same is None:
            break
    return len(distinct)


def _closing_braces(text: str) -> dict[int, int]:
    """Map the index after each opening brace to the index of its closing brace; escaped braces do not count."""
    opened, closings = list[int](), dict[int, int]()  # one pass: a response may open thousands of braces and close none
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif match[0] == "}" and opened:
            closings[opened.pop()] = match.start()
    return closings
