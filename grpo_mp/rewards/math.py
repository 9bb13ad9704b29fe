r"""Math rewards: whether a response has a \boxed{} answer, and whether that answer is right.

math-verify limits its time with SIGALRM, which works in the main thread only, and no signal handler runs during a long
operation on big integers: an answer like `10^{10^{10}}` could block the rank. So a child process compares, and the
parent kills it at the time limit. The child also limits its own CPU time and memory.
"""

import json
import math
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from grpo_mp.rewards.answer_reading import (
    Number,
    Text,
    is_close,
    read_answer,
    same_number,
    split_label,
    without_name,
)
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.json_worker import JsonWorker, WorkerEndedError
from grpo_mp.utils.processes import shared_environment

BoxChoice = Literal["last", "first"]
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # also matches escaped characters, so that escaped braces are skipped
START_LIMIT_S = 120.0
MEMORY_BYTES = 4 * 2**30
DIGITS = 100  # precision of irrational numbers
ROUNDING = 1e-12  # tolerance for decimals in an expression, which are floats


class MathVerifier:
    """Compares answers with math-verify in a child process, which `close` ends. Thread-safe."""

    def __init__(self, limit_s: float) -> None:
        """Limit each comparison to `limit_s` seconds."""
        self.limit_s = limit_s
        self._child: JsonWorker | None = None
        self._lock = threading.Lock()

    def equal(self, expected: str, predicted: str) -> bool | None:
        """Return whether two answers are equal; None at the time limit, or if the child dies."""
        with self._lock:
            self._child = self._child or _start_child()
            try:
                return bool(self._child.ask({"answers": (expected, predicted), "limit_s": self.limit_s}, self.limit_s))
            except WorkerEndedError:
                self._child = None
                return None

    def close(self) -> None:
        with self._lock:
            if self._child:
                self._child.end()
                self._child = None


def _start_child() -> JsonWorker:
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    child = JsonWorker(
        subprocess.Popen(
            [sys.executable, "-m", "grpo_mp.rewards.math"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the rank's process group must not end the comparison
            env={**shared_environment(), "PYTHONPATH": os.pathsep.join(filter(None, path))},
        )
    )
    try:  # loads imports and grammar tables before the first comparison is timed
        child.ask({"answers": ("1", "x"), "limit_s": START_LIMIT_S}, START_LIMIT_S)
    except WorkerEndedError as error:
        reason = "`python -c 'import math_verify'` shows the reason"
        raise UserError(f"reward.answer: math-verify did not start: {reason}") from error
    return child


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
    (label, value) = split_label(expected)
    (other_label, other_value) = split_label(predicted)
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
    # One pass: a response may open thousands of braces and close none
    opened = list[int]()
    closings = dict[int, int]()
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif match[0] == "}" and opened:
            closings[opened.pop()] = match.start()
    return closings


def _serve() -> None:
    """Run the child: answer comparisons until the parent ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not be read as a reply
    for line in sys.stdin:
        request = json.loads(line)
        # The kernel ends this process a few seconds of CPU time after the limit, also without its parent.
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        seconds = int(used.ru_utime + used.ru_stime + request["limit_s"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))
        print(json.dumps({"value": _is_equal(*request["answers"])}), file=replies, flush=True)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))  # after the imports of the first comparison


def _is_equal(expected: str, predicted: str) -> bool:
    """Return whether two answers are equal by math-verify. The parent enforces the time limit."""
    from math_verify import parse, verify

    gold, answer = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (expected, predicted))
    if not gold or not answer:
        return False
    is_equal = None if "%" in expected + predicted else _equal_numbers(gold[0], answer[0])
    if is_equal is not None:
        return is_equal
    # math-verify ignores a difference below 10^-precision, and floats have 15 digits. It rounds decimals to 6 places
    # by default: here to 6 places after the first digit of the smallest decimal.
    floats = [abs(number) for one in (gold[0], answer[0]) for number in _floats(one) if number]
    precision = 15 if floats else DIGITS
    places = max(6, 6 - math.floor(math.log10(min(floats, default=1))))
    return bool(verify(gold, answer, places, precision, timeout_seconds=None))


def _floats(expression: Any) -> set[Any]:
    from sympy import Float

    atoms: set[Any] = getattr(expression, "atoms", lambda kind: set())(Float)
    return atoms


def _equal_numbers(expected: Any, predicted: Any) -> bool | None:
    """Return whether two expressions have the same value; None if one is not a finite number, or if both are 0."""
    first = _value(expected)
    second = _value(predicted)
    if first is None or second is None:
        return None
    is_decimal = bool(_floats(expected) or _floats(predicted))
    if first.is_Rational and second.is_Rational and not is_decimal:
        return bool(first == second)
    left = first.evalf(DIGITS)
    right = second.evalf(DIGITS)
    size = max(abs(left), abs(right))
    if size < 10 ** (-DIGITS):
        return None
    if not is_decimal:
        return bool(abs(left - right) < size * 10 ** (10 - DIGITS))
    if abs(left - right) <= ROUNDING * min(1, abs(left)):
        return True
    if not (left.is_real and right.is_real):
        return False
    return is_close(Fraction(str(left)), Fraction(str(right)))


def _value(expression: Any) -> Any:
    """Return the value of an expression, with products and powers computed; None if it is not a finite number."""
    from sympy import Expr

    if not isinstance(expression, Expr) or expression.free_symbols:
        return None
    value = expression.doit()
    return value if value.is_number and value.is_finite and value.evalf(DIGITS).is_number else None


if __name__ == "__main__":
    _serve()
