"""Errors that a user can act on: printed as one sentence, never as a stack trace."""

import difflib
import errno
import math
import signal
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

Number = TypeVar("Number", int, float)
USER_STATUS = 2  # exit status of a process that ended with a UserError
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})  # full, quota, read-only, broken
INTERRUPT_STATUS = 128 + signal.SIGINT  # of one that ended by Ctrl-C


class UserError(Exception):
    """A mistake that the user can correct; the message says what is wrong, where, and what to do."""


class DiskError(UserError):
    """A folder cannot be written: the disk is full, a quota is reached, it is read-only or broken."""


class PhaseTimeout(UserError):  # noqa: N818
    """A wait timed out."""


class EngineError(UserError):
    """An engine is gone, broken or hangs; another one started in its place may do better."""


class EngineTimeout(EngineError, PhaseTimeout):  # noqa: N818
    """An engine did not answer in time."""


class EarlyStopError(UserError):
    """Training stops on purpose, as by a guard: to resume it is the user's decision, not that of a batch script."""


def exit_with(error: UserError) -> NoReturn:
    """Exit with status 2 and the error's sentence on stderr."""
    sys.stderr.write(f"error: {error}\n")
    raise SystemExit(USER_STATUS)


def read_number(kind: type[Number], value: Any, where: str) -> Number:
    """Return the value as `int` or `float`. Raises UserError, which begins with `where`, for what is no such number."""
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
    """Return an error's message as one line of at most `limit` characters; None: however long."""
    return " ".join(str(error).split())[:limit]
