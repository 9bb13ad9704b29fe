"""Read the command of a rank, check everything, then train or only say what would run."""

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import saved_state
from grpo_mp.config import Settings, SftSettings, load_settings, load_sft_settings
from grpo_mp.distributed.process_groups import single_rank_environment
from grpo_mp.platform.machine_check import check_device
from grpo_mp.trainer.context import local_ranks
from grpo_mp.trainer.describe import describe_run
from grpo_mp.trainer.exit import end_without_cleanup, exit_on_error
from grpo_mp.trainer.preflight import RunInputs, run_preflight, run_replay_preflight
from grpo_mp.trainer.replay import replay_settings
from grpo_mp.trainer.sft_preflight import SftInputs, describe_sft, run_sft_preflight
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.log import log_to_terminal
from grpo_mp.utils.parsers import sft_parser, train_parser


def run_command(train: Callable[[Settings, RunInputs], None], arguments: Sequence[str] | None = None) -> None:
    """Run a command line; `train` gets checked settings and what was read for them."""
    with _ending():
        args = train_parser().parse_intermixed_args(arguments)
        settings = load_settings(args.config, args.overrides, dtype=platform.default_dtype())
        preflight = run_preflight
        if args.replay:
            settings, preflight = replay_settings(settings), partial(run_replay_preflight, args.replay)
        if args.dry_run:
            world_size, ranks_per_node = _ranks(args)
            inputs = preflight(settings, world_size, ranks_per_node)
            if int(os.environ.get("RANK", 0)) == 0:
                settings = settings.with_steps(inputs.train.epoch_size)
                print(
                    describe_run(
                        settings, inputs, world_size=world_size, ranks_per_node=ranks_per_node, every_setting=args.all
                    )
                )
        elif args.ranks_per_node:
            raise UserError("--ranks-per-node is for --dry-run: a launcher says how many ranks a node has")
        else:
            with started_job(args.ranks) as (world_size, ranks_per_node):
                inputs = preflight(settings, world_size, ranks_per_node)
                train(settings.with_steps(inputs.train.epoch_size), inputs)


def run_sft_command(
    fine_tune: Callable[[SftSettings, SftInputs], None], arguments: Sequence[str] | None = None
) -> None:
    """Run a command line of supervised fine-tuning, as `run_command` does one of RL.

    The steps that its epochs take depend on the checkpoint from which it resumes: the job counts them.
    """
    with _ending():
        args = sft_parser().parse_intermixed_args(arguments)
        settings = load_sft_settings(args.config, args.overrides, platform.default_dtype())
        if args.dry_run:
            world_size, ranks_per_node = _ranks(args)
            _, inputs = run_sft_preflight(settings, world_size)
            state = saved_state(settings.run.folder)
            settings = settings.with_steps(inputs.train.epoch_size, state.step, state.samples_seen)
            if int(os.environ.get("RANK", 0)) == 0:
                print(
                    describe_sft(
                        settings, inputs, world_size=world_size, ranks_per_node=ranks_per_node, every_setting=args.all
                    )
                )
        elif args.ranks_per_node:
            raise UserError("--ranks-per-node is for --dry-run: a launcher says how many ranks a node has")
        else:
            with started_job(args.ranks) as (world_size, _):
                fine_tune(settings, run_sft_preflight(settings, world_size)[1])


def _ranks(args: argparse.Namespace) -> tuple[int, int]:
    """Return the ranks of the job and of a node: those of the command line, else those that a launcher started."""
    return (args.ranks, args.ranks_per_node or args.ranks) if args.ranks else local_ranks()


@contextmanager
def _ending() -> Iterator[None]:
    """Run a command line in the body: what it raises becomes the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # train.py sets the default action
    with end_without_cleanup(), exit_on_error():
        log_to_terminal()
        yield


@contextmanager
def started_job(ranks: int | None) -> Iterator[tuple[int, int]]:
    """Yield the world size and the ranks of this node; a process that no launcher started is a job of one rank.

    Raises UserError where `ranks` were asked for and others started, and for an unfit device.
    """
    is_launched = "RANK" in os.environ
    with nullcontext() if is_launched else single_rank_environment():
        world_size, ranks_per_node = local_ranks()
        if ranks not in (None, world_size):
            whence = (
                "the environment has RANK and WORLD_SIZE" if is_launched else "no launcher started others: WORLD_SIZE"
            )
            remedy = ", or unset both if no launcher set them" if is_launched else ""
            raise UserError(f"--ranks {ranks}, but {whence}={world_size}: start {ranks}, or omit --ranks{remedy}")
        check_device(int(os.environ["LOCAL_RANK"]))
        yield world_size, ranks_per_node
