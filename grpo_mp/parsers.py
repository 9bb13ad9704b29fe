"""Command-line parsers that are quick to import; those of training and evaluation are here, too."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from grpo_mp.errors import UserError

TRAIN = """Train a policy by GRPO.

--ranks N starts N ranks on this machine. Without it this process is one rank: of torchrun or srun, else the only one.
"""
EVALUATE = """Answer the held-out problems of data.eval, without training.

--ranks N starts N ranks on this machine. Without it this process is one rank: of torchrun or srun, else the only one.
Reads data.eval and the rewards of a settings file; the settings.yaml of a run is one.
"""


class Parser(argparse.ArgumentParser):
    """Raises UserError for a mistake on the command line."""

    def __init__(self, prog: str, description: str = "", parents: Sequence["Parser"] = (), **options: Any) -> None:
        super().__init__(
            prog=prog,
            description=description,
            parents=list(parents),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Raise UserError, where argparse would print the usage and exit."""
        raise UserError(f"{message}: see `{self.prog} --help`")


def settings_parser(command: str, description: str, *parents: Parser) -> Parser:
    """Return the parser of a command that reads a settings file and settings laid over it, and what `parents` read."""
    parser = Parser(f"grpo-mp {command}", description, parents)
    parser.add_argument("config", type=Path, help="settings file")
    overrides = "settings laid over the file's"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=overrides)
    return parser


def train_parser() -> Parser:
    """Return the parser of `grpo-mp train` and `python -m grpo_mp.train`."""
    parser = settings_parser("train", TRAIN)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    parser.add_argument("--ranks", type=positive_int, help="ranks to start on this machine, or to check")
    replay = "train without engines from RUN/rollouts_dump, which a run with rollout.dump=true wrote"
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help=replay)
    parser.add_argument("--ranks-per-node", type=positive_int, help="with --dry-run: ranks on one node (default: all)")
    return parser


def evaluate_parser() -> Parser:
    """Return the parser of `grpo-mp evaluate` and `python -m grpo_mp.evaluate`."""
    parser = settings_parser("evaluate", EVALUATE)
    parser.add_argument("--ranks", type=positive_int, help="ranks to start on this machine")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, help="a Hugging Face or converted folder (default: model.path)")
    source.add_argument("--checkpoint", type=Path, help="RUN/checkpoints/step_N of a run of these settings")
    parser.add_argument("--out", type=Path, help="folder for the results (default: run.folder/evaluate/NAME)")
    return parser


def positive_int(text: str) -> int:
    """Return a number of ranks or nodes. Raises ArgumentTypeError for one below 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return int(text)
