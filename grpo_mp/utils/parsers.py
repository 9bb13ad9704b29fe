"""Command-line parsers that are quick to import; those of training, evaluation and sampling are here, too."""

import argparse
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any, NoReturn

from grpo_mp.utils.errors import UserError

MAX_RANKS = 2**16

TRAIN = """Train a policy by GRPO.

--ranks N starts N ranks on this machine. Without it this process is one rank: of torchrun or srun, else the only one.
"""
SFT = """Fine-tune a policy on given chats, supervised: the loss is on what the assistant says.

--ranks N starts N ranks on this machine. Without it this process is one rank: of torchrun or srun, else the only one.
"""
EVALUATE = """Answer the held-out problems of data.eval, without training.

--ranks N starts N ranks on this machine. Without it this process is one rank: of torchrun or srun, else the only one.
Reads data.eval and the rewards of a settings file; the settings.yaml of a run is one.
"""
SAMPLE = """Answer the prompts of data.train, score and filter the answers, and write them to a Parquet file.

--ranks N starts N ranks on this machine. Without it this process is one rank: of torchrun or srun, else the only one.
Reads the settings file of a training run; `sample` says which answers are kept. The same command goes on after a kill.
"""

DOES_NOT_FIT = 1  # exit status of `grpo-mp plan`


class Parser(argparse.ArgumentParser):
    """Raises UserError for a mistake on the command line."""

    def __init__(self, prog: str, description: str = "", **options: Any) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Raise UserError, where argparse would print the usage and exit."""
        raise UserError(f"{message}: see `{self.prog} --help`")


def settings_parser(command: str, description: str) -> Parser:
    """Return the parser of a command that reads a settings file and settings laid over it."""
    parser = Parser(f"grpo-mp {command}", description)
    parser.add_argument("config", type=Path, help="settings file")
    overrides = "settings laid over the file's"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=overrides)
    return parser


def train_parser() -> Parser:
    """Return the parser of `grpo-mp train` and `python -m grpo_mp.train`."""
    parser = settings_parser("train", TRAIN)
    replay = "train without engines from RUN/rollouts_dump, which a run with rollout.dump=true wrote"
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help=replay)
    _add_start(parser)
    return parser


def sft_parser() -> Parser:
    """Return the parser of `grpo-mp sft` and `python -m grpo_mp.sft`."""
    parser = settings_parser("sft", SFT)
    _add_start(parser)
    return parser


def _add_start(parser: Parser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    parser.add_argument("--all", action="store_true", help="with --dry-run: print every setting, defaults among them")
    parser.add_argument("--ranks", type=number_of_ranks, help="ranks to start on this machine, or to check")
    per_node = "with --dry-run: ranks on one node (default: all)"
    parser.add_argument("--ranks-per-node", type=number_of_ranks, help=per_node)


def evaluate_parser() -> Parser:
    """Return the parser of `grpo-mp evaluate` and `python -m grpo_mp.evaluate`."""
    parser = settings_parser("evaluate", EVALUATE)
    _add_model(parser, "folder for the results (default: run.folder/evaluate/NAME)")
    return parser


def sample_parser() -> Parser:
    """Return the parser of `grpo-mp sample` and `python -m grpo_mp.sample`."""
    parser = settings_parser("sample", SAMPLE)
    _add_model(parser, "folder for the answers (default: run.folder/sample/NAME)")
    samples = "answers to each prompt (default: rollout.group_size)"
    parser.add_argument("--samples", type=positive_int, metavar="N", help=samples)
    return parser


def _add_model(parser: Parser, out: str) -> None:
    parser.add_argument("--ranks", type=number_of_ranks, help="ranks to start on this machine")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, help="a Hugging Face or converted folder (default: model.path)")
    source.add_argument("--checkpoint", type=Path, help="RUN/checkpoints/step_N of a run of these settings")
    parser.add_argument("--out", type=Path, help=out)


def positive_int(text: str) -> int:
    """Return a number of tokens, bytes or steps. Raises ArgumentTypeError for one below 1, or none."""
    return _integer(text, 10**12)


def number_of_ranks(text: str) -> int:
    """Return a number of ranks or nodes. Raises ArgumentTypeError for one below 1, or of more than any cluster has."""
    return _integer(text, MAX_RANKS)


def count_up_to(largest: int) -> Callable[[str], int]:
    """Return a type of arguments: whole numbers from 0 on. It raises ArgumentTypeError for others."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= largest):
            raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {largest:,}, got {text[:50]}")
        return int(text)

    return parse


def number_between(smallest: float, largest: float) -> Callable[[str], float]:
    """Return a type of arguments: numbers in a range, ends included. It raises ArgumentTypeError for others."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not smallest <= value <= largest:
            raise argparse.ArgumentTypeError(f"expected a number from {smallest:g} to {largest:g}, got {text[:50]}")
        return value

    return parse


share = number_between(0, 1)


def _integer(text: str, largest: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 1 <= int(text) <= largest):
        limit = f" of at most {largest:,}" if text.isdecimal() and text.strip("0") else ""
        raise argparse.ArgumentTypeError(f"expected a positive integer{limit}, got {text[:50]}")
    return int(text)


def non_negative(text: str) -> float:
    """Return a number of hours or seconds. Raises ArgumentTypeError for one below 0, or none."""
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text[:50]}")
    return value
