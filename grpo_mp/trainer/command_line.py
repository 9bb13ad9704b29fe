"""Command-line handling of one rank: arguments, exit status, and world size from the launcher's environment."""

import argparse
import gc
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from grpo_mp.distributed.process_groups import single_rank_environment
from grpo_mp.platform.machine_check import check_start
from grpo_mp.trainer.exit import end_without_cleanup, exit_on_error
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.log import log_to_terminal


@contextmanager
def command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> Iterator[argparse.Namespace]:
    """Yield the parsed arguments; an error in the body becomes the exit status of the process."""
    gc.freeze()  # collections need not walk through the objects of the imports
    gc.enable()  # this and the next line end what `begin_slow_imports` began
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with end_without_cleanup(), exit_on_error():
            log_to_terminal()
            yield parser.parse_intermixed_args(arguments)
    finally:
        gc.unfreeze()  # extension modules report what is not collected at the exit


@contextmanager
def started_job(
    ranks: int | None, dry_run: bool = False, ranks_per_node: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the world size and the ranks per node; a process without a launcher is a job of one rank.

    `ranks`, `ranks_per_node`: from the command line; a dry run describes a job of this size.
    """
    if dry_run:
        yield (ranks, ranks_per_node or ranks) if ranks else local_ranks()
        return
    if ranks_per_node:
        raise UserError("--ranks-per-node is for --dry-run: a launcher says how many ranks a node has")
    is_launched = "RANK" in os.environ
    with nullcontext() if is_launched else single_rank_environment():
        world_size, local = local_ranks()
        if ranks not in (None, world_size):
            whence = (
                "the environment has RANK and WORLD_SIZE" if is_launched else "no launcher started others: WORLD_SIZE"
            )
            remedy = ", or unset both if no launcher set them" if is_launched else ""
            raise UserError(f"--ranks {ranks}, but {whence}={world_size}: start {ranks}, or omit --ranks{remedy}")
        check_start(int(os.environ["LOCAL_RANK"]))
        yield world_size, local


def local_ranks() -> tuple[int, int]:
    """Return the world size and the ranks per node from the environment of torchrun or srun; by default (1, 1)."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def print_once(text: str) -> None:
    """Print `text` on rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(text)
