"""`python -m grpo_mp.train`: read the command, check everything, then train or only say what would run."""

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from grpo_mp.config import Settings, load_settings
from grpo_mp.errors import UserError
from grpo_mp.platform.device_check import check_device
from grpo_mp.platform.warnings import silence_known_warnings
from grpo_mp.trainer.context import local_ranks
from grpo_mp.trainer.dry_run import describe_run
from grpo_mp.trainer.exit import exit_on_error
from grpo_mp.trainer.preflight import Inputs, check_and_read


class Parser(argparse.ArgumentParser):
    """Raises UserError for a mistake on the command line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see `python -m {self.prog} --help`")


def run_command(train: Callable[[Settings, Inputs], None], arguments: Sequence[str] | None = None) -> None:
    """Run a command line; `train` gets checked settings and what was read for them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # train.py sets the default action
    with exit_on_error():
        silence_known_warnings()
        args = _parser().parse_intermixed_args(arguments)
        settings = load_settings(args.config, args.overrides)
        if args.dry_run:
            _dry_run(settings, args.ranks, args.ranks_per_node)
        elif args.ranks or args.ranks_per_node:
            raise UserError("--ranks is for --dry-run; `python -m grpo_mp.launch --ranks N CONFIG` starts N ranks")
        else:
            train(settings, _check_launched(settings))


def _parser() -> Parser:
    parser = Parser(prog="grpo_mp.train", description="GRPO. Start it with torchrun or grpo_mp.launch.")
    parser.add_argument("config", type=Path, help="settings file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file's")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    parser.add_argument("--ranks", type=int, help="ranks to check a dry run for (default: those that were started)")
    parser.add_argument("--ranks-per-node", type=int, help="of these on one node (default: all)")
    return parser


def _check_launched(settings: Settings) -> Inputs:
    if "RANK" not in os.environ:
        raise UserError(
            "no launcher started this process: use `torchrun --nproc-per-node N -m grpo_mp.train CONFIG` or "
            "`python -m grpo_mp.launch --ranks N CONFIG`"
        )
    world_size, ranks_per_node = local_ranks()
    check_device(int(os.environ.get("LOCAL_RANK", 0)))
    return check_and_read(settings, world_size, ranks_per_node)


def _dry_run(settings: Settings, ranks: int | None, ranks_per_node: int | None) -> None:
    for option, value in (("--ranks", ranks), ("--ranks-per-node", ranks_per_node)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: give at least one rank")
    world_size, ranks_per_node = (ranks, ranks_per_node or ranks) if ranks else local_ranks()
    inputs = check_and_read(settings, world_size, ranks_per_node)
    if int(os.environ.get("RANK", 0)) == 0:
        print(describe_run(settings, inputs, world_size, ranks_per_node))
