"""The work that both sides of the comparison do: one tiny model, the same prompts, the same response lengths."""

import json
import random
from pathlib import Path

from tools.tiny.models import make_tiny, make_tokenizer

PROMPTS, GROUP_SIZE = 16, 8
PROMPT_TOKENS, SHORTEST, LONGEST = 256, 16, 512
TEMPLATE_TOKENS = 3  # <|user|>, <|im_end|>, <|assistant|>
KL_WEIGHT, LEARNING_RATE, CLIP_GRAD, BETAS, EPS = 0.04, 1e-5, 1.0, (0.9, 0.98), 1e-8
MODEL, PROMPT_FILE, LENGTH_FILE = "model", "prompts.jsonl", "lengths.json"

Lengths = dict[str, list[int]]  # prompt text -> response tokens of each sample, the end token included


def make_workload(folder: Path, family: str, seed: int) -> Lengths:
    """Write the model folder, the prompts and the lengths of one family under `folder`; returns the lengths."""
    make_tiny(folder / MODEL, family, make_tokenizer([]), seed)
    draw = random.Random(seed)
    questions = ["".join(draw.choices("0123456789+-=", k=PROMPT_TOKENS - TEMPLATE_TOKENS)) for _ in range(PROMPTS)]
    rows = (json.dumps({"question": question, "answer": "0"}) + "\n" for question in questions)
    (folder / PROMPT_FILE).write_text("".join(rows))
    lengths = draw_lengths(questions, draw)
    (folder / LENGTH_FILE).write_text(json.dumps(lengths))
    return lengths


def draw_lengths(questions: list[str], draw: random.Random) -> Lengths:
    """Equal steps of the logarithm from SHORTEST to LONGEST, in random order: every octave is equally likely."""
    count = len(questions) * GROUP_SIZE
    drawn = [round(SHORTEST * (LONGEST / SHORTEST) ** (i / (count - 1))) for i in range(count)]
    draw.shuffle(drawn)
    return {question: drawn[i * GROUP_SIZE : (i + 1) * GROUP_SIZE] for i, question in enumerate(questions)}


def read_questions(folder: Path) -> list[str]:
    return [json.loads(line)["question"] for line in (folder / PROMPT_FILE).read_text().splitlines()]


def read_lengths(folder: Path) -> Lengths:
    lengths: Lengths = json.loads((folder / LENGTH_FILE).read_text())
    return lengths


def describe(lengths: Lengths) -> str:
    drawn = sorted(length for group in lengths.values() for length in group)
    quantiles = ", ".join(f"{25 * q} %: {drawn[q * (len(drawn) - 1) // 4]}" for q in range(5))
    return f"{len(drawn)} responses, {sum(drawn)} tokens, mean {sum(drawn) / len(drawn):.0f}; {quantiles}"
