"""Groups that a real server breaks off again and again go on as if nothing had been."""

import asyncio
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mp.config.truncation import TopP
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.groups import PausedGroup
from grpo_mp.rollout.worker import RolloutTask, RolloutWorker
from grpo_mp.utils.types import Prompt, SampleGroup

PROMPT = Prompt(0, "", (5, 6, 7, 8, 9, 10, 11, 12))
SAMPLES = 256
MAX_TOKENS = 24
TOLERANCE = 1e-4


async def generate(client: EngineClient, sampling: SamplingParams) -> tuple[SampleGroup, list[EngineOutput]]:
    """Return a group that was broken off many times, and what the engine said of what was not finished."""
    tokenizer: Any = SimpleNamespace(get_added_vocab=dict, batch_decode=lambda tokens, **_: [""] * len(tokens))
    scorer: Any = None
    worker = RolloutWorker(client, scorer, tokenizer, 60.0, lambda error: None)
    task = RolloutTask(lambda _: PROMPT, SAMPLES, 0, 1, sampling)
    aborted = list[EngineOutput]()
    parse = client._parse_output
    rng = random.Random(0)

    def recording(*arguments: Any) -> EngineOutput:
        output = parse(*arguments)
        aborted.extend([output] * output.aborted)
        return output

    client._parse_output = recording  # type: ignore[method-assign]
    group: Any = None
    while not isinstance(group, SampleGroup):
        running = asyncio.create_task(worker._answer(task, 0, PROMPT, group))
        while not running.done():
            await asyncio.wait([running], timeout=rng.uniform(0.1, 0.4))
            await client.abort_all()
        group = running.result()
        if isinstance(group, PausedGroup):
            assert [output.aborted for output in group.outputs].count(True) > 0
    return group, aborted


@pytest.mark.parametrize("kept", [None, 8])
def test_responses_that_were_paused_end_where_they_should(
    ask: Callable[..., Any], model_folder: Path, expected_logprobs: Callable[..., torch.Tensor], kept: int | None
) -> None:
    top_p: TopP = {"top_k": kept} if kept else 1.0
    sampling = SamplingParams(MAX_TOKENS, top_p=top_p, with_kept=kept is not None)
    end = json.loads((model_folder / "config.json").read_text())["eos_token_id"]
    # The engine breaks off responses that have just got their end token, or their last token: one in a few hundred.
    for _ in range(20):
        group, aborted = ask(lambda client: generate(client, sampling))
        if any(output.tokens[-1:] == (end,) or len(output.tokens) == MAX_TOKENS for output in aborted):
            break
    else:
        raise AssertionError("no response was broken off after its end")
    assert len(group.samples) == SAMPLES
    for sample in group.samples:
        assert end not in sample.tokens[:-1]
        assert len(sample.tokens) == MAX_TOKENS if sample.truncated else sample.tokens[-1] == end
        assert len(sample.tokens) == len(sample.rollout_logprobs) == len(sample.weight_versions)
        assert not any(map(math.isnan, sample.rollout_logprobs))
    for sample in group.samples[::32]:
        table = expected_logprobs(model_folder, [*PROMPT.tokens, *sample.tokens])[len(PROMPT.tokens) - 1 : -1]
        reference = table.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        if kept:
            assert sample.kept.counts.tolist() == [kept] * len(sample.tokens)
            reference -= table.gather(1, torch.from_numpy(sample.kept.padded(kept)).long()).logsumexp(1)
        assert (reference - torch.tensor(sample.rollout_logprobs)).abs().max() < TOLERANCE
