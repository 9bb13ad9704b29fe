"""Start the ranks of one machine: `python -m grpo_mp.launch --ranks 2 CONFIG section.key=value ...`.

torchrun starts the same program. This front end over torch's own launcher keeps quiet, so that the sentence of the rank
that knows is the last word; it ends with that rank's status; a signal to it goes to every rank, with all the time they
need to save; and ranks that vanish with status 0 are an error, which torchrun cannot see where all of them do.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from grpo_mp.distributed.exit_marks import MARKS_VARIABLE, ranks_without_mark, silent_exit_message
from grpo_mp.errors import USER_STATUS

HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
CONSEQUENCES = (1, -signal.SIGTERM)  # how ranks end that lost a peer, or that the launcher ended after one failed
VANISHED_STATUS = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; ends with the status of the rank that failed first, 0 when all ended well."""
    parser = argparse.ArgumentParser(prog="grpo_mp.launch", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="processes to start (default: 1)")
    parser.add_argument("--evaluate", action="store_true", help="run grpo_mp.evaluate instead of grpo_mp.train")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="CONFIG section.key=value ..., as for grpo_mp.train")
    given = parser.parse_args(arguments)
    if given.ranks < 1:
        parser.exit(USER_STATUS, f"error: --ranks {given.ranks}: give at least one rank\n")
    sys.exit(launch(given.ranks, given.command, "grpo_mp.evaluate" if given.evaluate else "grpo_mp.train"))


def launch(ranks: int, command: Sequence[str], program: str = "grpo_mp.train") -> int:
    """Run a program on so many ranks until all have ended; returns the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks and engines share the cores
    _hush(logging.getLogger("torch.distributed.elastic"))
    for number in HANDED_ON:
        signal.signal(number, _hand_on)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    with tempfile.TemporaryDirectory(prefix="grpo_mp_") as marks:
        os.environ[MARKS_VARIABLE] = marks
        failures: dict[int, ProcessFailure] = {}
        try:
            elastic_launch(config, sys.executable)("-u", "-m", program, *command)
        except ChildFailedError as error:
            failures = error.failures
        return _explain(failures, [rank for rank in ranks_without_mark(Path(marks), ranks) if rank not in failures])


def _explain(failures: Mapping[int, ProcessFailure], vanished: Sequence[int]) -> int:
    """The job's exit status; says what no rank could. `vanished`: ranks that ended with status 0, but not in order."""
    if vanished and all(failure.exitcode in CONSEQUENCES for failure in failures.values()):
        sys.stderr.write(f"error: {silent_exit_message(vanished[0])}\n")
        return VANISHED_STATUS
    if not failures:
        return 0
    rank, first = min(failures.items(), key=lambda item: (item[1].exitcode in CONSEQUENCES, item[1].timestamp))
    if first.exitcode > 0:
        return first.exitcode  # the rank has said why
    sys.stderr.write(f"error: rank {rank} was ended by {first.signal_name()}\n")
    return 128 - first.exitcode


def _hand_on(number: int, frame: FrameType | None) -> None:
    for rank in psutil.Process().children():
        rank.send_signal(number)


def _hush(logger: logging.Logger) -> None:
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


if __name__ == "__main__":
    main()
