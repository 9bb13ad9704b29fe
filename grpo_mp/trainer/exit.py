"""End of a rank: after a signal and a save, or after an error, with one message per job and an exit status."""

import atexit
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from grpo_mp.distributed.rendezvous import FAILURE, is_first_failure
from grpo_mp.utils.errors import (
    DISK_ERRORS,
    INTERRUPT_STATUS,
    DiskError,
    EarlyStopError,
    UserError,
    exit_with,
)
from grpo_mp.utils.files import write_atomically

PEER_FAILED_STATUS = 1
FIRST_RANK_LIMIT_S = 30.0  # wait of other ranks for rank 0 to report an error that all ranks find
# Error messages of gloo, NCCL and the store after the peer process has ended.
PEER_GONE = re.compile(r"Connection (was likely )?(closed|reset)|Broken pipe|remote process exited|failed to recv")


class PeerFailedError(Exception):
    """Another rank failed first; the message of that rank gives the cause."""


class PreemptionHandler:
    """Records SIGTERM and SIGUSR1, which request that the run saves a checkpoint and ends."""

    def __init__(self) -> None:
        self._received = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._remember)
        # Slurm signals every process of a step. Child processes of a rank, such as the writers of a save, inherit
        # blocked signals, but not handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def requested(self, cpu_group: dist.ProcessGroup) -> bool:
        """Return whether any rank received a signal; equal on all ranks."""
        requested = torch.tensor([self._received or signal.SIGUSR1 in signal.sigpending()], dtype=torch.int32)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX, group=cpu_group)
        return bool(requested.item())

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = True


@contextmanager
def report_error_once(rank: int, store: dist.Store) -> Iterator[None]:
    """Re-raise a UserError of the body on the first rank that fails; raise PeerFailedError on ranks that fail later.

    A lost connection raises PeerFailedError, a full or broken disk DiskError.
    """
    try:
        yield
    except UserError as error:
        if not is_first_failure(store, FAILURE):
            raise _peer_failed(rank, error) from error
        raise
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        if not is_first_failure(store, FAILURE):
            raise _peer_failed(rank, error) from error
        place = f"{error.filename}: " if error.filename else ""
        phase = _failed_phase(rank, error)
        raise DiskError(f"{phase}: {place}{error.strerror}: make room for run.folder, and start again") from error
    except RuntimeError as error:
        if PEER_GONE.search(str(error)):
            raise _peer_failed(rank, error) from error
        raise


def ignore_more_interrupts(kind: type[BaseException] | None, *_: object) -> None:
    """Ignore Ctrl-C while an earlier Ctrl-C closes the run; an exit callback for ExitStack.push."""
    if kind is KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Convert errors of the body to SystemExit; re-raise unexpected errors with their traceback.

    Exit status: 2 for UserError, 1 for PeerFailedError, 130 for Ctrl-C.
    """
    rank = int(os.environ.get("RANK", 0))
    try:
        yield
    except UserError as error:
        if rank and not dist.is_initialized():
            # If rank 0 fails, the launcher ends this rank meanwhile; otherwise the node's first failed rank reports.
            time.sleep(FIRST_RANK_LIMIT_S + int(os.environ.get("LOCAL_RANK", 0)))
        _ignore_sigterm()
        _report_to_launcher(rank, f"error: {error}", error)
        exit_with(error)
    except PeerFailedError as error:
        _ignore_sigterm()
        sys.stderr.write(f"{error}\n")
        raise SystemExit(PEER_FAILED_STATUS) from None
    except KeyboardInterrupt as interrupt:
        raise _interrupted(rank, interrupt) from None
    except Exception as error:
        if isinstance(_origin(error), KeyboardInterrupt):  # Ctrl-C interrupted a library's cleanup
            raise _interrupted(rank, error) from None
        _report_to_launcher(rank, f"{type(error).__name__}: {error}", error)
        raise


def _origin(error: BaseException) -> BaseException:
    while error.__context__:
        error = error.__context__
    return error


def _interrupted(rank: int, error: BaseException) -> SystemExit:
    if rank == 0:
        sys.stderr.write(f"{_failed_phase(rank, error)}: stopped by Ctrl-C\n")
    return SystemExit(INTERRUPT_STATUS)


@contextmanager
def end_without_cleanup() -> Iterator[None]:
    """If the body fails during a job, run the atexit functions and end the process without interpreter shutdown."""
    # Threads may wait for messages that never come: at interpreter shutdown C++ wakes them and calls abort().
    try:
        yield
    except BaseException as error:
        if not dist.is_initialized():
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def _peer_failed(rank: int, error: BaseException) -> PeerFailedError:
    return PeerFailedError(f"{_failed_phase(rank, error)}: another rank failed; see its error")


def _failed_phase(rank: int, error: BaseException) -> str:
    return next(iter(getattr(error, "__notes__", ())), f"rank {rank}")


def _ignore_sigterm() -> None:
    if "RANK" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _report_to_launcher(rank: int, message: str, error: Exception) -> None:
    """Write the error file from which torchrun and batch scripts (cli/slurm_job.py) read the root cause."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()) - 1)}
        values: dict[str, Any] = {"message": {"message": message, "extraInfo": extra}, "rank": rank}
        if isinstance(error, EarlyStopError):
            values["may_restart"] = False
        with suppress(OSError):
            write_atomically(Path(file), json.dumps(values))
