"""Command-line parsers of train, sft, evaluate and sample, in a module of their own so that --help is fast."""

import argparse
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from grpo_mp.utils.errors import UserError

RANKS = """

--ranks N starts N ranks on this machine. Without it this process is one rank: of torchrun or srun, else the only one.
"""
TRAIN = f"Train a policy by GRPO.{RANKS}"
SFT = f"Fine-tune a policy on given chats, supervised: the loss is on what the assistant says.{RANKS}"
EVALUATE = f"""Answer the held-out problems of data.eval, without training.{RANKS}
Reads data.eval and the rewards of a settings file; the settings.yaml of a run is one.
"""
SAMPLE = f"""Answer the prompts of data.train, score and filter the answers, and write them to a Parquet file.{RANKS}
Reads the settings file of a training run; `sample` selects answers. After a kill the same command resumes.
"""

DOES_NOT_FIT = 1  # exit status of `grpo-mp plan`


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UserError for a wrong command line, instead of exiting."""

    def __init__(self, prog: str, description: str = "", **options: Any) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see `{self.prog} --help`")


def settings_parser(command: str, description: str) -> Parser:
    """Return the parser of a command that takes a settings file and overrides."""
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
    parser.add_argument("--ranks", type=positive_int, help="ranks to start on this machine, or to check")
    per_node = "with --dry-run: ranks on one node (default: all)"
    parser.add_argument("--ranks-per-node", type=positive_int, help=per_node)


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
    parser.add_argument("--ranks", type=positive_int, help="ranks to start on this machine")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, help="a Hugging Face folder (default: model.path)")
    source.add_argument("--checkpoint", type=Path, help="RUN/checkpoints/step_N of a run of these settings")
    parser.add_argument("--out", type=Path, help=out)


def positive_int(text: str) -> int:
    """Parse an integer above 0 (a `type` of argparse)."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text[:50]}")
    return int(text)


def non_negative(text: str) -> float:
    """Parse a finite number of 0 or more (a `type` of argparse)."""
    value = float(text)
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text[:50]}")
    return value
