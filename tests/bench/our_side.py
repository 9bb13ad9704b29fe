"""One rank of our side: `grpo_mp.train` as it is, with an engine client that asks for responses of given lengths.

Started by beside_trl.py under torchrun.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_mp.config import Settings, check_settings
from grpo_mp.rollout.client import EngineClient, Generated, Sampling
from grpo_mp.train import train
from grpo_mp.trainer.preflight import check_and_read
from grpo_mp.trainer.session import local_ranks, open_session
from tests.bench.workload import (
    BETAS,
    CLIP_GRAD,
    EPS,
    GROUP_SIZE,
    KL_WEIGHT,
    LEARNING_RATE,
    LONGEST,
    MODEL,
    PROMPT_FILE,
    PROMPT_TOKENS,
    PROMPTS,
    read_lengths,
)


class ExactLengths(EngineClient):
    """Draws each response of a group with its own length. The prompt is computed once, as SGLang does for `n`."""

    def __init__(self, client: EngineClient, lengths: dict[tuple[int, ...], list[int]]) -> None:
        self.__dict__.update(vars(client))
        self._lengths = lengths

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, count: int = 1) -> list[Generated]:
        await self.score([prompt_tokens])
        draw = super().generate
        wanted = self._lengths[tuple(prompt_tokens)]
        exact = [replace(sampling, max_response_tokens=length, ignore_eos=True) for length in wanted]
        groups = await asyncio.gather(*(draw(prompt_tokens, one, 1) for one in exact))
        return [group[0] for group in groups]


def make_settings(folder: Path, run_folder: Path, steps: int, **sections: Any) -> Settings:
    tree: dict[str, Any] = {
        "run": {"folder": str(run_folder), "steps": steps, "save_every": 0, "eval_every": 0, "export": False},
        "model": {"path": str(folder / MODEL), "dtype": "float32"},
        "data": {"train": str(folder / PROMPT_FILE), "shuffle": False},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "group_size": GROUP_SIZE,
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": LONGEST,
        },
        "reward": {"length": 1.0},
        "algorithm": {"kl": {"weight": KL_WEIGHT}},
        "optimizer": {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "clip_grad": CLIP_GRAD},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return check_settings(tree, "the benchmark")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--set", default="{}")
    given = parser.parse_args()
    import json
    settings = make_settings(given.folder, given.run_folder, given.steps, **json.loads(given.set))
    inputs = check_and_read(settings, *local_ranks())
    texts = read_lengths(given.folder)
    with open_session(settings, inputs) as session:
        if session.rollout.client:
            lengths = {prompt.tokens: texts[prompt.text] for prompt in inputs.train}
            session.rollout.client = ExactLengths(session.rollout.client, lengths)
        train(session)


if __name__ == "__main__":
    main()
