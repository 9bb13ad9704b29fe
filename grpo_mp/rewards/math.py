r"""The rewards of GSM8K-like tasks: whether there is a \boxed{} answer, and whether it is right."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from grpo_mp.rewards.math_verify_worker import MathVerifier, is_close

BoxChoice = Literal["last", "first"]
NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)"
FRACTION = re.compile(rf"({NUMBER})/({NUMBER})")
LATEX_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # and what is escaped, which counts as none
DECORATION = re.compile(r"\\[$!,;:]|\\left|\\right|\\text\{[^{}]*\}|[\s$~]")


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
    return float(predicted is not None and same_answer(answer, predicted, verifier))


def same_answer(expected: str, predicted: str, verifier: MathVerifier) -> bool:
    """Return whether two answers are equal: plain numbers by `is_close`, all else by math-verify."""
    expected_values, predicted_values = numeric_readings(expected), numeric_readings(predicted)
    if expected_values and predicted_values:
        return any(is_close(a, b, verifier.tolerance) for a in expected_values for b in predicted_values)
    return predicted == expected or verifier.equal(expected, predicted)


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
    timeouts_before = verifier.timeouts
    for index, other in enumerate(distinct):
        if same_answer(other, answer, verifier):
            return index
        if verifier.timeouts > timeouts_before:
            break
    return len(distinct)


def numeric_readings(text: str) -> tuple[float, ...]:
    r"""Return the values that a plain number can mean; nothing for any other text.

    Reads 1,234.5, $5, \$5, 3/4, \frac{3}{4}, 5 \text{ apples} and 50%, which means 50 as well as 0.5.
    """
    bare = DECORATION.sub("", text).removesuffix(".")
    digits = bare.removesuffix("%").removesuffix("\\")
    number = _parse_number(digits)
    if number is None or not math.isfinite(number):
        return ()
    return (number, number / 100) if digits != bare else (number,)


def _parse_number(text: str) -> float | None:
    if match := LATEX_FRACTION.fullmatch(text):
        text = f"{match[1]}{match[2]}/{match[3]}"
    if re.fullmatch(NUMBER, text):
        return float(text.replace(",", ""))
    if (match := FRACTION.fullmatch(text)) and float(match[2].replace(",", "")):
        try:
            numerator, denominator = (Fraction(number.replace(",", "").rstrip(".")) for number in match.groups())
            return float(numerator / denominator)
        except (OverflowError, ValueError):  # beyond the range of floats, or thousands of digits
            return None
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Return the index of the brace that closes each one, by the index behind that; escaped braces do not count.

    One pass: a response may open thousands that nothing closes.
    """
    opened, closings = list[int](), dict[int, int]()
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif match[0] == "}" and opened:
            closings[opened.pop()] = match.start()
    return closings
