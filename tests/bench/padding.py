"""Tokens that micro-batches hold over tokens of samples, for long-tailed lengths: python -m tests.bench.padding

Each recipe's updates are planned by the trainer's own scheduler: lognormal responses up to 32,768 tokens after prompts
of up to 2,048, samples of an update, layout and max_tokens_per_microbatch as the recipe has them, on the nodes that its
first line names. Reach: 1.05 with a pipeline; exit status 1 where one is above.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from grpo_mp.batching.updates import padded_size, plan_updates
from grpo_mp.config import Settings, load_settings
from grpo_mp.distributed.coordinates import data_parallel

REACH = 1.05
PROMPT, RESPONSE, HIDDEN, STEPS = 2048, 32768, 7168, 5
RECIPES = Path(__file__).parents[2] / "configs"
NODES = re.compile(r"--nodes (\d+)")


def main() -> None:
    """Print one line for each recipe."""
    worst = 0.0
    for path, settings, ranks in recipes():
        ratio = waste(settings, ranks)
        pipeline = settings.layout.pipeline
        worst = max(worst, ratio) if pipeline > 1 else worst
        print(f"{path.stem:20} pipeline {pipeline}, data {data_parallel(settings.layout, ranks):3}: {ratio:.3f}")
    raise SystemExit(worst > REACH)


def recipes() -> Iterator[tuple[Path, Settings, int]]:
    """Every recipe for machines of 8 GPUs, and its ranks."""
    for path in sorted(RECIPES.glob("*.yaml")):
        if nodes := NODES.search(path.read_text()):
            yield path, load_settings(path), 8 * int(nodes[1])


def waste(settings: Settings, ranks: int) -> float:
    """Padded tokens over real tokens, of a few steps."""
    layout, training = settings.layout, settings.training
    replicas, padded, real = data_parallel(layout, ranks), 0, 0
    for step in range(STEPS):
        lengths = list(long_tailed(settings.samples_per_step, step))
        real += sum(lengths)
        tokens = training.max_tokens_per_microbatch
        for update in plan_updates(lengths, training.updates_per_step, layout, replicas, tokens, HIDDEN):
            size = padded_size(update.schedule, layout)
            padded += sum(size or plan.tokens for rank in update.schedule.ranks for plan in rank)
    return padded / real


def long_tailed(count: int, seed: int) -> Iterator[int]:
    """Lengths of prompt and response, half of the responses below 6,000 tokens."""
    draw = random.Random(seed)
    for _ in range(count):
        yield draw.randint(50, PROMPT) + max(1, min(RESPONSE, int(draw.lognormvariate(8.7, 1.0))))


if __name__ == "__main__":
    main()
