"""One rank of our side: `grpo_mp.train` as it is, with an engine client that asks for responses of given lengths.

Started by compare_trl.py under torchrun; the times are read from the run's trace.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.train import TrainContext, generate, open_context, read_inputs, train
from grpo_mp.trainer.command_line import local_ranks
from tests.bench import workload as w


class ExactLengths(EngineClient):
    """Draws each response of a group with its own length, in one call, its prompt before it, as SGLang does for `n`.

    What is broken off goes on to that length.
    """

    def __init__(self, client: EngineClient, lengths: dict[tuple[int, ...], list[int]]) -> None:
        self.__dict__.update(vars(client))  # the same connections
        self._lengths = lengths
        self._left = defaultdict[tuple[int, ...], list[int]](list)

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        count: int = 1,
        routing: ModelShape | None = None,
        routed_tokens: int = 0,
    ) -> list[EngineOutput]:
        prompt = tuple(prompt_tokens)
        if waiting := self._left[prompt]:
            lengths = [waiting.pop()]
        else:
            lengths = self._lengths[prompt]
            await super().generate(prompt_tokens, replace(sampling, max_response_tokens=1, ignore_eos=True))
        exact = [replace(sampling, max_response_tokens=length, ignore_eos=True).as_json(1) for length in lengths]
        prompts = [list(prompt_tokens)] * len(exact)
        body = {"input_ids": prompts, "sampling_params": exact, "return_logprob": True}
        outputs = [
            self._parse_output(output, len(prompt_tokens), None) for output in await self._generate(body, len(exact))
        ]
        for length, output in zip(lengths, outputs, strict=True):
            if output.aborted:
                kept = output.without_last_step(1).tokens  # as the worker goes on with it
                self._left[*prompt, *kept].append(length - len(kept))
        return outputs


def make_settings(folder: Path, run_folder: Path, steps: int, schedule: str, staleness: int | None) -> Settings:
    sizes = w.read_sizes(folder)
    tree = {
        "schedule": schedule,
        "engine": {"ranks": int(schedule != "colocated"), "args": {"decode_log_interval": 5}},
        "run": {"folder": str(run_folder), "steps": steps, "save_every": 0, "eval_every": 0, "export": False},
        "model": {"path": str(folder / w.MODEL), "dtype": "float32"},
        "data": {"train": str(folder / w.PROMPT_FILE), "shuffle": False},
        "rollout": {
            "prompts_per_step": sizes.prompts,
            "group_size": sizes.group_size,
            "max_prompt_tokens": w.PROMPT_TOKENS,
            "max_response_tokens": sizes.longest,
            **({} if staleness is None else {"max_staleness": staleness}),
        },
        "reward": {"repetition": 1.0},
        "algorithm": {"kl": {"coef": w.KL_WEIGHT}},
        "optimizer": {"lr": w.LEARNING_RATE, "betas": w.BETAS, "eps": w.EPS, "clip_grad": w.CLIP_GRAD},
        "training": {"share_prompts": True},
    }
    return check_settings(tree, "the benchmark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--schedule", default="colocated")
    parser.add_argument("--staleness", type=int)
    given = parser.parse_args()
    settings = make_settings(given.folder, given.run_folder, given.steps, given.schedule, given.staleness)
    inputs = read_inputs(settings, *local_ranks())
    lengths = w.read_lengths(given.folder)
    with open_context(settings, inputs) as ctx:
        if (engine := ctx.recovery.rollout.engine) and engine.client:
            by_tokens = {prompt.tokens: lengths[prompt.text] for prompt in inputs.train}
            engine.client = ExactLengths(engine.client, by_tokens)
        if isinstance(ctx, TrainContext):
            train(ctx)
        else:
            generate(ctx)


if __name__ == "__main__":
    main()
