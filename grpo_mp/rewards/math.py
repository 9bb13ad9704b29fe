r"""The rule reward of GSM8K-like tasks: is there a \boxed{} answer, and is it the right one?"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from grpo_mp.rewards.math_verify_worker import Equality, close

Which = Literal["last", "first"]
NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)"
FRACTION = re.compile(rf"({NUMBER})/({NUMBER})")
LATEX_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
DECORATION = re.compile(r"\\[$!,;:]|\\left|\\right|\\text\{[^{}]*\}|[\s$~]")


def boxed_answer(text: str, which: Which = "last") -> str | None:
    r"""What stands in the last or first \boxed{...} whose braces balance; None without one, or where it is blank."""
    starts = [found.end() for found in re.finditer(r"\\f?box(?:ed)?\s*\{", text)]
    for start in reversed(starts) if which == "last" else starts:
        if (end := _closing_brace(text, start)) is not None:
            return text[start:end].strip() or None
    return None


def boxed_part(response: str) -> float:
    """1 if the response contains a boxed answer, else 0."""
    return float(boxed_answer(response) is not None)


def answer_part(response: str, answer: str, equality: Equality, which: Which = "last") -> float:
    """1 if the boxed answer (the last or the first one) has the right value, else 0."""
    found = boxed_answer(response, which)
    return float(found is not None and same_answer(answer, found, equality))


def same_answer(expected: str, found: str, equality: Equality) -> bool:
    """Whether two answers have one value: plain numbers as `close` says, all else as math-verify does."""
    ours, theirs = numeric_readings(expected), numeric_readings(found)
    if ours and theirs:
        return any(close(a, b, equality.tolerance) for a in ours for b in theirs)
    return found == expected or equality.equal(expected, found)


def answer_numbers(responses: Sequence[str], equality: Equality, which: Which = "last") -> list[int | None]:
    """Which answer each response gives: those that give the same have the same number; None: no boxed answer.

    An answer is the first one before it that it equals. One that cannot be compared in time is an answer of its own.
    """
    answers = [boxed_answer(response, which) for response in responses]
    numbers: dict[str, int] = {}
    firsts: list[str] = []
    for found in answers:
        if found is not None and found not in numbers:
            numbers[found] = _place(found, firsts, equality)
            firsts += [found] if numbers[found] == len(firsts) else []
    return [None if found is None else numbers[found] for found in answers]


def _place(found: str, firsts: Sequence[str], equality: Equality) -> int:
    """Index of the first that equals it; the next free one where none does."""
    given_up = equality.timeouts
    for number, first in enumerate(firsts):
        if same_answer(first, found, equality):
            return number
        if equality.timeouts > given_up:
            break
    return len(firsts)


def numeric_readings(text: str) -> tuple[float, ...]:
    r"""The values that a plain number can mean; empty for anything else.

    Reads 1,234.5, $5, \$5, 3/4, \frac{3}{4}, 5 \text{ apples} and 50%, which means 50 as well as 0.5.
    """
    bare = DECORATION.sub("", text).removesuffix(".")
    percent = bare.removesuffix("%").removesuffix("\\")
    number = _number(percent)
    if number is None or not math.isfinite(number):
        return ()
    return (number, number / 100) if percent != bare else (number,)


def _number(text: str) -> float | None:
    if found := LATEX_FRACTION.fullmatch(text):
        text = f"{found[1]}{found[2]}/{found[3]}"
    if re.fullmatch(NUMBER, text):
        return float(text.replace(",", ""))
    if (found := FRACTION.fullmatch(text)) and float(found[2].replace(",", "")):
        above, below = (Fraction(part.replace(",", "").rstrip(".")) for part in found.groups())
        return float(above / below)
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one before `start`; escaped braces do not count."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 2 if character == "\\" else 1
    return None
