"""Rollout functions that reward the episodes of a prompt together."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rollout.client import SamplingParams
from grpo_mp.rollout.protocol import Episode, Policy, Task
from grpo_mp.utils.types import Sample
from tests.rollout.engineless import TextClient, make_prompt, make_runner
from tests.virtual_time import run_virtually
from tools.tiny.products import tokenizer

HERE = str(Path(__file__))


class Ranked:
    """Rewards an episode by its place among those of its group, by what it kept; index 2 fails."""

    def __init__(self, breaks: str = "") -> None:
        self.breaks = breaks

    async def __call__(self, task: Task, policy: Policy) -> Episode:
        await policy.generate(task.messages)
        if task.index == 2:
            raise RuntimeError("no")
        episode = policy.episode(metrics={"own": 1.0})
        object.__setattr__(episode, "kept", {"score": 10.0 * (3 - task.index)})
        return episode

    async def score_group(self, kept: Sequence[Any]) -> list[tuple[float, dict[str, float]]]:
        if self.breaks == "raises":
            raise RuntimeError("broken rubric")
        if self.breaks == "waits":
            await asyncio.sleep(3600)
        scores = sorted(one["score"] for one in kept)
        places = [(float(scores.index(one["score"])), {"of": float(len(kept))}) for one in kept]
        return places[1:] if self.breaks == "short" else places


def roll_out(count: int, **args: Any) -> tuple[tuple[Sample, ...], list[Sample]]:
    runner = make_runner(TextClient(tokenizer(), ["7<|im_end|>"]), f"{HERE}:Ranked", function_args=args)
    recorded = list[Sample]()
    group = runner.run_group(make_prompt(runner), 7, count, 1, SamplingParams(2000), None, record=recorded.append)
    return asyncio.run(group), recorded


def test_episodes_are_rewarded_together_when_the_last_has_ended() -> None:
    samples, recorded = roll_out(4)
    assert [sample.state for sample in samples] == ["completed", "completed", "error", "completed"]
    assert [sample.episode_reward for sample in samples] == [2.0, 1.0, None, 0.0]
    assert [sample.metrics.get("of") for sample in samples] == [3.0, 3.0, None, 3.0]
    assert [sample.metrics.get("own") for sample in samples] == [1.0, 1.0, None, 1.0]
    # What has not its reward yet is not kept for a run that resumes: the journal leaves out what has an environment.
    assert all(sample.environment is not None for sample in recorded if sample.state == "completed")


@pytest.mark.parametrize(("breaks", "sentence"), [("raises", "RuntimeError: broken rubric"), ("short", "ValueError")])
def test_a_group_that_cannot_be_rewarded_fails(breaks: str, sentence: str) -> None:
    samples, _ = roll_out(2, breaks=breaks)
    assert [sample.state for sample in samples] == ["error", "error"]
    assert all(f"rewarding the group together raised {sentence}" in sample.error for sample in samples)


def test_a_pause_amid_the_reward_leaves_a_group_that_goes_on() -> None:
    async def pause_amid() -> tuple[Sample, ...]:
        runner = make_runner(
            TextClient(tokenizer(), ["7<|im_end|>"]), f"{HERE}:Ranked", function_args={"breaks": "waits"}
        )
        group = asyncio.create_task(runner.run_group(make_prompt(runner), 7, 2, 1, SamplingParams(2000), None))
        await asyncio.sleep(60)  # it waits for its rewards then
        assert not group.done()
        runner.pause.set()
        return await group

    (sample,) = run_virtually(pause_amid())
    assert (sample.state, sample.episode_reward) == ("completed", None)
