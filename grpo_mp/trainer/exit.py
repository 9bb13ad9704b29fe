"""How a rank ends: one sentence for a user's mistake, one voice for the whole job, a status that says which."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from grpo_mp.config import exit_with
from grpo_mp.distributed.exit_marks import mark_finished
from grpo_mp.errors import UserError

PEER_FAILED_STATUS = 1
INTERRUPT_STATUS = 128 + signal.SIGINT
FIRST_RANK_LIMIT_S = 30.0  # what every rank finds wrong, rank 0 says: so long the others leave the word to it
# What gloo, NCCL and the store say when the process at the other end is gone.
GONE = re.compile(r"Connection (was likely )?(closed|reset)|Broken pipe|remote process exited|failed to recv")


class PeerFailedError(Exception):
    """Another rank ended before this one; its message says why."""


@contextmanager
def report_error_once(rank: int, store: dist.Store) -> Iterator[None]:
    """Of the ranks that end in the body, only one explains a user's mistake; the others raise PeerLostError.

    The first to come takes the word. A rank that is merely cut off from its peers never does.
    """
    try:
        yield
    except UserError as error:
        if not _takes_the_word(store):
            raise _peer_lost(rank, error) from error
        raise
    except RuntimeError as error:
        if GONE.search(str(error)):
            raise _peer_lost(rank, error) from error
        raise


def ignore_more_interrupts(kind: type[BaseException] | None, *_: object) -> None:
    """For ExitStack.push: while a first Ctrl-C takes the run apart, a second must not break that off."""
    if kind is KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn what the body raises into the end of this process; an unexpected error keeps its trace.

    Raises SystemExit: 2 for a user's mistake, 1 for a lost peer, 130 for Ctrl-C.
    """
    rank = int(os.environ.get("RANK", 0))
    try:
        yield
        mark_finished(rank)
    except UserError as error:
        if rank and not dist.is_initialized():
            _leave_the_word()
        _ignore_launcher()
        _tell_launcher(f"error: {error}")
        exit_with(error)
    except PeerFailedError as lost:
        _ignore_launcher()
        sys.stderr.write(f"{lost}\n")
        raise SystemExit(PEER_FAILED_STATUS) from None
    except KeyboardInterrupt as interrupt:
        if rank == 0:
            sys.stderr.write(f"{_where(rank, interrupt)}: stopped by Ctrl-C\n")
        raise SystemExit(INTERRUPT_STATUS) from None
    except SystemExit as end:
        if not end.code:  # --help
            mark_finished(rank)
        raise
    except Exception as error:
        _tell_launcher(f"{type(error).__name__}: {error}")
        raise


def _leave_the_word() -> None:
    """Wait to be ended by the launcher; where rank 0 has nothing to say, the first rank of a node goes first."""
    time.sleep(FIRST_RANK_LIMIT_S + int(os.environ.get("LOCAL_RANK", 0)))


def _takes_the_word(store: dist.Store) -> bool:
    try:
        return store.add("ended", 1) == 1
    except RuntimeError:
        return True  # the store is gone: a sentence too many is better than none


def _peer_lost(rank: int, error: BaseException) -> PeerFailedError:
    return PeerFailedError(f"{_where(rank, error)}: another rank ended; its message says why")


def _where(rank: int, error: BaseException) -> str:
    """'rank 1 in TRAIN': the innermost phase that the error went through, where it went through one."""
    return next(iter(getattr(error, "__notes__", ())), f"rank {rank}")


def _ignore_launcher() -> None:
    """The end of another rank makes the launcher end this one, which is ending already with a status of its own."""
    if "RANK" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _tell_launcher(message: str) -> None:
    """torchrun shows this in its closing summary as the root cause: the failure with the earliest time."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()) - 1)}
        with open(file, "w") as stream:
            json.dump({"message": {"message": message, "extraInfo": extra}}, stream)
