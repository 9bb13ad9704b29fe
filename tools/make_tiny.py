"""Make a tiny model and its task: an ordinary Hugging Face folder, and arithmetic word problems in GSM8K's format.

    python tools/make_tiny.py --family deepseek_v3 --out checkpoints/tiny_deepseek_v3 --data data/arithmetic

With --cold-start P the random model gets supervised steps on worked examples until it answers held-out problems
with probability P. Half of the examples (--slips) contain a careless slip, so the policy learns the method and the
carelessness with it: that is what rewards can mend. Without --cold-start the weights stay random.
"""

import argparse
import os
import random
import time
from pathlib import Path

import torch
from rich.console import Console

from grpo_mp.config import exit_with
from grpo_mp.errors import UserError
from grpo_mp.examples.arithmetic import (
    TEMPLATES,
    Problem,
    draw_slip,
    make_problems,
    vocabulary_words,
    worked_response,
    write_jsonl,
)
from grpo_mp.examples.cold_start import ColdStartStep, Recipe, cold_start
from grpo_mp.examples.tiny_models import SHAPES, make_tiny
from grpo_mp.examples.tiny_tokenizer import make_tokenizer
from grpo_mp.platform.warnings import silence_known_warnings


def main() -> None:
    """Command line; see the text above."""
    wanted = _parser().parse_args()
    silence_known_warnings()
    torch.set_num_threads(wanted.threads)
    try:
        train, held_out = make_problems(wanted.train, wanted.eval, wanted.seed, wanted.largest, tuple(wanted.kinds))
        write_jsonl(train, wanted.data / "train.jsonl")
        write_jsonl(held_out, wanted.data / "eval.jsonl")
        _make_model(wanted, train)
    except UserError as error:
        exit_with(error)


def _make_model(wanted: argparse.Namespace, train: list[Problem]) -> None:
    console = Console(highlight=False)
    tokenizer = make_tokenizer(vocabulary_words())
    untaught = wanted.out.with_name(wanted.out.name + "_random") if wanted.cold_start else wanted.out
    make_tiny(untaught, wanted.family, tokenizer, wanted.seed)
    console.print(f"{len(train)} problems in {wanted.data}; a random {wanted.family} in {untaught}")
    if not wanted.cold_start:
        return
    started = time.monotonic()

    def watch(step: ColdStartStep) -> None:
        if step.right is not None:
            seconds = time.monotonic() - started
            console.print(f"cold start step {step.step}: loss {step.loss:.3f}, right {step.right:.1%}, {seconds:.0f} s")

    draw = random.Random(wanted.seed)
    taught = [(problem.question, worked_response(problem, draw_slip(draw, wanted.slips))) for problem in train]
    recipe = Recipe(steps=wanted.steps)
    measured = [(problem.question, worked_response(problem)) for problem in train[-recipe.held_out :]]
    problems = taught[: -recipe.held_out] + measured
    cold_start(untaught, wanted.out, problems, wanted.seed, wanted.cold_start, recipe, watch)
    console.print(f"after the cold start: {wanted.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(SHAPES), default="deepseek_v3")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny_deepseek_v3"), help="the model's folder")
    parser.add_argument("--data", type=Path, default=Path("data/arithmetic"), help="folder of train and eval.jsonl")
    parser.add_argument("--largest", type=int, default=29, help="largest operand")
    parser.add_argument("--kinds", nargs="+", choices=sorted(TEMPLATES), default=["add"])
    parser.add_argument("--train", type=int, default=6000, help="train problems")
    parser.add_argument("--eval", type=int, default=200, help="eval problems; no operands of theirs are in train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold-start", type=float, default=0.0, metavar="P", help="probability to reach; 0: random")
    parser.add_argument("--slips", type=float, default=0.5, help="share of the worked examples with a careless slip")
    parser.add_argument("--steps", type=int, default=200, help="most supervised steps")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


if __name__ == "__main__":
    main()
