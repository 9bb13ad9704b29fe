"""Make a tiny model and its task: a Hugging Face folder, and arithmetic word problems in GSM8K's format.

    python -m tools.tiny.make --family deepseek_v3 --out checkpoints/tiny_deepseek_v3 --data data/arithmetic

Also writes worked examples as chat data for `grpo-mp sft`: cold_start.jsonl and cold_start_held_out.jsonl. With
--cold-start P the random model is fine-tuned on the examples until it answers held-out problems with probability P.
Half of the examples (--slips) contain a careless slip, so that the policy learns the method and the carelessness, which
rewards can then correct. Without --cold-start the weights stay random.
"""

import argparse
import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from grpo_mp.utils.errors import UserError, exit_with
from grpo_mp.utils.log import log_to_terminal
from grpo_mp.utils.parsers import Parser, positive_int
from grpo_mp.utils.reading import read_json
from tools.tiny import products, repositories
from tools.tiny.arithmetic import (
    TEMPLATES,
    HasRow,
    Problem,
    draw_slip,
    make_problems,
    vocabulary_words,
    worked_response,
    write_jsonl,
)
from tools.tiny.cold_start import (
    NUM_HELD_OUT,
    ColdStartStep,
    cold_start,
    cold_start_settings,
    write_examples,
)
from tools.tiny.models import TINY_CONFIGS, make_tiny, make_tokenizer


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    log_to_terminal()
    torch.set_num_threads(args.threads)
    if args.task == "calculator":
        train, held_out = products.make_problems(args.train, args.eval, args.seed)
        _write_problems(train, held_out, args.data)
        tokenizer = products.tokenizer()
        examples = products.make_examples(train, args.seed, NUM_HELD_OUT)
    elif args.task == "repositories":
        broken, broken_held_out = repositories.make_problems(args.train, args.eval, args.seed)
        _write_problems(broken, broken_held_out, args.data)
        tokenizer = repositories.tokenizer()
        examples = repositories.make_examples(broken, args.seed, NUM_HELD_OUT)
    else:
        train, held_out = make_problems(args.train, args.eval, args.seed, args.largest, tuple(args.kinds))
        _write_problems(train, held_out, args.data)
        tokenizer = make_tokenizer(vocabulary_words())
        examples = worked_examples(train, args.seed, args.slips)
    _make_model(args, tokenizer, write_examples(examples, args.data))


def _write_problems(train: Iterable[HasRow], held_out: Iterable[HasRow], folder: Path) -> None:
    write_jsonl(train, folder / "train.jsonl")
    write_jsonl(held_out, folder / "eval.jsonl")


def worked_examples(train: Sequence[Problem], seed: int, slips: float) -> list[dict[str, Any]]:
    """Return the problems as chats with worked answers.

    `slips`: share of the answers with a slip; the last NUM_HELD_OUT answers, which are held out, have none.
    """
    rng = random.Random(seed)
    held_out = len(train) - NUM_HELD_OUT
    drawn = [draw_slip(rng, slips) for _ in train]
    answers = (worked_response(problem, drawn[i] if i < held_out else None) for i, problem in enumerate(train))
    return [
        {
            "messages": [
                {"role": "user", "content": problem.question},
                {"role": "assistant", "content": answer},
            ]
        }
        for problem, answer in zip(train, answers, strict=True)
    ]


def _make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, examples: tuple[Path, Path]) -> None:
    console = Console(highlight=False)
    random_model = args.out.with_name(args.out.name + "_random") if args.cold_start else args.out
    for folder in {random_model, args.out}:
        _check_replaceable(folder, TINY_CONFIGS[args.family]["hidden_size"])
    make_tiny(random_model, args.family, tokenizer, args.seed)
    console.print(f"{args.train} problems in {args.data}; a random {args.family} in {random_model}")
    if not args.cold_start:
        return
    started = time.monotonic()

    def print_step(step: ColdStartStep) -> None:
        if step.prob is not None:
            seconds = time.monotonic() - started
            console.print(f"cold start step {step.step}: loss {step.loss:.3f}, right {step.prob:.1%}, {seconds:.0f} s")

    settings = cold_start_settings(random_model, *examples, args.seed, args.steps)
    cold_start(settings, args.out, args.cold_start, print_step)
    console.print(f"after the cold start: {args.out}")


def _check_replaceable(folder: Path, hidden_size: int) -> None:
    """Refuse to overwrite a folder whose model has another hidden size, since it is not a tiny model."""
    if (config := folder / "config.json").exists():
        there = read_json(config)
        if not isinstance(there, dict) or there.get("hidden_size") != hidden_size:
            raise UserError(f"{folder} has another model: give an --out that is not there, or remove it")


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("python -m tools.tiny.make", __doc__ or "")
    parser.add_argument("--family", choices=sorted(TINY_CONFIGS), default="deepseek_v3")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny_deepseek_v3"), help="the model's folder")
    parser.add_argument("--data", type=Path, default=Path("data/arithmetic"), help="folder of train and eval.jsonl")
    parser.add_argument(
        "--task",
        choices=("arithmetic", "calculator", "repositories"),
        default="arithmetic",
        help="calculator: products, by a tool; repositories: a wrong line to edit in a sandbox",
    )
    parser.add_argument("--largest", type=positive_int, default=29, help="largest operand")
    parser.add_argument("--kinds", nargs="+", choices=sorted(TEMPLATES), default=["add"])
    parser.add_argument("--train", type=positive_int, default=6000, help="train problems")
    parser.add_argument(
        "--eval", type=positive_int, default=200, help="eval problems; train has none of their operands"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold-start", type=float, default=0.0, metavar="P", help="probability to reach; 0: random")
    parser.add_argument("--slips", type=float, default=0.5, help="share of the worked examples with a careless slip")
    parser.add_argument("--steps", type=positive_int, default=200, help="maximum number of supervised steps")
    parser.add_argument("--threads", type=positive_int, default=os.cpu_count() or 1)
    return parser


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with(error)
