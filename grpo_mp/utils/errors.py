"""Exceptions that a user can act on. Commands print them as one sentence, without a stack trace."""

import difflib
import errno
import math
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

Number = TypeVar("Number", int, float)
USER_STATUS = 2  # exit status of a process that ended with a UserError
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})  # full, quota, read-only, broken
INTERRUPT_STATUS = 128 + signal.SIGINT  # exit status of a process that was stopped with Ctrl-C


class UserError(Exception):
    """A mistake that the user can correct. The message states what is wrong, where, and how to fix it."""


class DiskError(UserError):
    """A write failed because the disk is full, over quota, read-only or broken."""


class PhaseTimeout(UserError):  # noqa: N818
    """A phase, or a wait inside a phase, exceeded its time limit."""


class EngineError(UserError):
    """An engine crashed, hangs or returned invalid data; restarting the engine may help."""


class EngineTimeout(EngineError, PhaseTimeout):  # noqa: N818
    """An engine did not answer within its time limit."""


class EarlyStopError(UserError):
    """Training stopped on purpose, for example by a metric guard. Batch scripts do not resume the run."""


@contextmanager
def refuse_failures(what: str, kinds: tuple[type[BaseException], ...] = (Exception,)) -> Iterator[None]:
    """Convert an error of the body to a UserError "WHAT: TypeError: message"; re-raise a UserError unchanged.

    `kinds`: the classes of errors to convert.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{what}: {type(error).__name__}: {one_line(error)}") from error


def exit_with(error: UserError) -> NoReturn:
    """Write the message to stderr and exit with USER_STATUS."""
    sys.stderr.write(f"error: {error}\n")
    raise SystemExit(USER_STATUS)


def read_number(kind: type[Number], value: Any, where: str) -> Number:
    """Convert a number, or text with a number, to `kind`. Rejects booleans, infinity, NaN, and fractions for `int`.

    `where`: the setting or file that the error message begins with.
    """
    noun = "an integer" if kind is int else "a number"
    try:
        number = kind(value)
        if not isinstance(value, bool) and math.isfinite(number) and (isinstance(value, str) or number == value):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{where}: expected {noun}, found {repr(value)[:100]}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]}?)" if matches else ""


def one_line(error: object, limit: int | None = 300) -> str:
    """Return the message of an error on one line, cut to `limit` characters. `limit=None`: uncut."""
    return " ".join(str(error).split())[:limit]
