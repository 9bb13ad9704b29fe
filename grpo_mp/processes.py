"""Tie the life of one process to that of another, by what Linux offers: prctl(2)."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Set an option of this process. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def end_with_launcher() -> None:
    """Let a rank that torchrun or `grpo-mp train --ranks` started be killed when that ends, however it does.

    Otherwise a rank would go on where nobody sees it, beside those of the job that is started in its place.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
