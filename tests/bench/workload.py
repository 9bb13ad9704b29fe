"""The work that both sides of the comparison do: one model, the same prompts, the same response lengths."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.smollm2 import make_smollm2
from tools.tiny.models import make_tiny, make_tokenizer

PROMPTS = 16
GROUP_SIZE = 8
PROMPT_TOKENS = 256
SHORTEST = 16
LONGEST = 512
TEMPLATE_TOKENS = 3  # <|user|>, <|im_end|>, <|assistant|>
KL_WEIGHT = 0.04
LEARNING_RATE = 1e-5
CLIP_GRAD = 1.0
BETAS = (0.9, 0.98)
EPS = 1e-8
MODEL = "model"
PROMPT_FILE = "prompts.jsonl"
LENGTH_FILE = "lengths.json"
SIZE_FILE = "sizes.json"
SMOLLM2 = "smollm2"
STORY = (
    "A shop sells {} boxes of pencils on Monday and {} times as many on Tuesday. Each box holds {} pencils, and {} of "
    "all the pencils are broken. How many whole pencils did the shop sell on these two days?"
)

Lengths = dict[str, list[int]]  # prompt text -> response tokens of each sample, the end token included


@dataclass(frozen=True)
class Sizes:
    prompts: int = PROMPTS
    group_size: int = GROUP_SIZE
    longest: int = LONGEST

    @property
    def samples(self) -> int:
        return self.prompts * self.group_size


def make_workload(folder: Path, family: str, seed: int) -> Lengths:
    """Write the model folder, the prompts, lengths and sizes of one family under `folder`; returns the lengths."""
    sizes = Sizes(prompts=4, group_size=4, longest=128) if family == SMOLLM2 else Sizes()
    draw = random.Random(seed)
    if family == SMOLLM2:
        make_smollm2(folder / MODEL)
        questions = [STORY.format(*draw.sample(range(2, 99), 4)) for _ in range(sizes.prompts)]
    else:
        make_tiny(folder / MODEL, family, make_tokenizer([]), seed)
        characters = PROMPT_TOKENS - TEMPLATE_TOKENS
        questions = ["".join(draw.choices("0123456789+-=", k=characters)) for _ in range(sizes.prompts)]
    rows = (json.dumps({"question": question, "answer": "0"}) + "\n" for question in questions)
    (folder / PROMPT_FILE).write_text("".join(rows))
    lengths = draw_lengths(questions, sizes, draw)
    (folder / LENGTH_FILE).write_text(json.dumps(lengths))
    (folder / SIZE_FILE).write_text(json.dumps(asdict(sizes)))
    return lengths


def draw_lengths(questions: list[str], sizes: Sizes, draw: random.Random) -> Lengths:
    """Equal steps of the logarithm from SHORTEST to the longest, in random order: every octave is equally likely."""
    steps = sizes.samples - 1
    drawn = [round(SHORTEST * (sizes.longest / SHORTEST) ** (i / steps)) for i in range(sizes.samples)]
    draw.shuffle(drawn)
    count = sizes.group_size
    return {question: drawn[i * count : (i + 1) * count] for i, question in enumerate(questions)}


def read_sizes(folder: Path) -> Sizes:
    return Sizes(**json.loads((folder / SIZE_FILE).read_text()))


def read_questions(folder: Path) -> list[str]:
    return [json.loads(line)["question"] for line in (folder / PROMPT_FILE).read_text().splitlines()]


def read_lengths(folder: Path) -> Lengths:
    lengths: Lengths = json.loads((folder / LENGTH_FILE).read_text())
    return lengths


def describe(lengths: Lengths) -> str:
    drawn = sorted(length for group in lengths.values() for length in group)
    quantiles = ", ".join(f"{25 * q} %: {drawn[q * (len(drawn) - 1) // 4]}" for q in range(5))
    return f"{len(drawn)} responses, {sum(drawn)} tokens, mean {sum(drawn) / len(drawn):.0f}; {quantiles}"
