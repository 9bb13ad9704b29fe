"""Run math-verify in a child process, where a time limit can be enforced.

math-verify limits its time with SIGALRM, which works in the main thread only, and no signal handler runs during a long
operation on big integers: an answer like `10^{10^{10}}` could block the rank. So a child process compares, and the
parent kills it at the time limit. The child also limits its own CPU time and memory.
"""

import math
import os
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from fractions import Fraction
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_mp.rewards.answer_reading import is_close
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.processes import shared_environment

START_LIMIT_S = 120.0
MEMORY_BYTES = 4 * 2**30
DIGITS = 100  # precision of irrational numbers
ROUNDING = 1e-12  # tolerance for decimals in an expression, which are floats


class MathVerifier:
    """Compares answers with math-verify in a child process, which `close` ends. Thread-safe."""

    def __init__(self, limit_s: float) -> None:
        """Limit each comparison to `limit_s` seconds."""
        self.limit_s = limit_s
        self._child: subprocess.Popen[bytes] | None = None
        self._connection, _ = Pipe()
        self._lock = threading.Lock()

    def equal(self, expected: str, predicted: str) -> bool | None:
        """Return whether two answers are equal; None at the time limit, or if the child dies."""
        with self._lock:
            if self._child is None:
                self._start()
            with suppress(EOFError, OSError):  # the child has ended
                self._connection.send((expected, predicted, self.limit_s))
                if self._connection.poll(self.limit_s):
                    return bool(self._connection.recv())
            self._end()
            return None

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> None:
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        self._connection, of_child = Pipe()
        with of_child:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "grpo_mp.rewards.math_verify_worker", str(of_child.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[of_child.fileno()],
                start_new_session=True,  # a signal to the rank's process group must not end the comparison
                env={**shared_environment(), "PYTHONPATH": os.pathsep.join(filter(None, path))},
            )
        with suppress(EOFError):
            if self._connection.poll(START_LIMIT_S) and self._connection.recv():
                return
        self._end()
        raise UserError("reward.answer: math-verify did not start: `python -c 'import math_verify'` shows the reason")

    def _end(self) -> None:
        if self._child:
            self._child.kill()
            self._child.wait()
            self._connection.close()
            self._child = None


def _serve(connection: Connection) -> None:
    """Run the child: answer comparisons until the parent ends."""
    _is_equal("1", "x")  # loads imports and grammar tables before the first comparison is timed
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    connection.send(True)
    while True:
        expected, predicted, limit_s = connection.recv()
        # The kernel ends this process a few seconds of CPU time after the limit, also without its parent.
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + limit_s) + 2, hard))
        connection.send(_is_equal(expected, predicted))


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
    first, second = _value(expected), _value(predicted)
    if first is None or second is None:
        return None
    is_decimal = bool(_floats(expected) or _floats(predicted))
    if first.is_Rational and second.is_Rational and not is_decimal:
        return bool(first == second)
    left, right = first.evalf(DIGITS), second.evalf(DIGITS)
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
    _serve(Connection(int(sys.argv[1])))
