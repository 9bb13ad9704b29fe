"""When episodes end: their clock, and what is left of a group when a step or the run does; without an engine."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_mp.config.sections import RolloutConfig
from grpo_mp.episodes.protocol import Episode, Policy, Task
from grpo_mp.examples.calculator import tokenizer as calculator_tokenizer
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.client import EngineOutput, SamplingParams
from grpo_mp.rollout.episodes import EpisodeRunner, load_episode_parts
from grpo_mp.rollout.request_limits import RequestLimits
from grpo_mp.rollout.worker import PausedGroup, RolloutTask, RolloutWorker, RunningGroup, pause_running
from grpo_mp.types import Prompt, Sample, SampleGroup

HERE = str(Path(__file__))
WORDS = calculator_tokenizer()


class SlowEngine:
    """Answers `6` after a while; its tool-call parser takes a while, too."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.limits, self.index = seconds, RequestLimits(), 0

    async def generate(self, tokens: Any, sampling: SamplingParams, routing: Any = None) -> list[EngineOutput]:
        await asyncio.sleep(self.seconds)
        sampled = (*WORDS.encode("6", add_special_tokens=False), WORDS.eos_token_id)
        return [EngineOutput(sampled, (-1.0,) * len(sampled), (3,) * len(sampled), False)]

    async def parse_tool_calls(self, text: str, tools: Any, parser: str) -> tuple[str, list[tuple[str, str]]]:
        await asyncio.sleep(self.seconds)
        return text, []

    async def abort_all(self) -> None:
        """Nothing is being generated."""


def make_runner(engine: SlowEngine, function: str, **config: Any) -> EpisodeRunner:
    sizes = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 20, "max_response_tokens": 60}
    parts = load_episode_parts(RolloutConfig(**sizes | {"function": function} | config), WORDS)
    assert parts
    client: Any = engine
    return EpisodeRunner(parts, client, asyncio.Semaphore(4))


def make_prompt(runner: EpisodeRunner) -> Prompt:
    message = {"role": "user", "content": "How many?"}
    return Prompt(4, "How many?", runner.parts.renderer.prompt([message]), messages=(message,))


def roll_out(runner: EpisodeRunner) -> Sequence[Sample]:
    return asyncio.run(runner.run_group(make_prompt(runner), 7, 1, 1, SamplingParams(60), None))


def test_the_clock_of_an_episode_stands_still_while_its_turns_are_generated() -> None:
    """Each turn takes longer than the episode may, and so does the engine's parser of its calls."""
    tools = {"tools": ["grpo_mp.examples.calculator:calculator"], "tool_parser": "pythonic"}
    runner = make_runner(SlowEngine(0.4), "call_tools", limits={"episode_s": 0.2}, **tools)
    (sample,) = roll_out(runner)
    assert (sample.state, sample.error, sample.metrics["turns"]) == ("completed", "", 1)
    (slow,) = roll_out(make_runner(SlowEngine(0.1), f"{HERE}:idle", limits={"episode_s": 0.2}))
    assert (slow.state, slow.metrics["turns"]) == ("timeout", 1)


async def idle(task: Task, policy: Policy) -> Episode:
    """Index 0 ends; the others wait for something that is no engine."""
    await policy.generate(task.messages)
    if task.index or "idle" not in task.prompt.columns:
        await asyncio.sleep(60)
    return policy.episode(metrics={"step": task.step})


def test_a_stop_ends_episodes_that_wait_for_something_else_and_keeps_what_had_ended() -> None:
    """What is resumed has the episode that had ended, and rolls out the other again."""
    runner = make_runner(SlowEngine(0.0), f"{HERE}:idle")
    prompt, recorded = make_prompt(runner), list[Any]()
    prompt.columns["idle"] = True
    scorer: Any = SimpleNamespace()
    tokenizer: Any = WORDS
    worker = RolloutWorker(runner.client, scorer, tokenizer, 60.0, print, runner)
    task = RolloutTask(lambda _: prompt, 2, 7, 1, SamplingParams(60), record=lambda *group: recorded.append(group))

    async def stop() -> Any:
        group = asyncio.create_task(worker._generate_group(task, 7, prompt, None, None))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        ended = await pause_running(runner.client, {0: RunningGroup(group)}, runner.pause)
        assert time.monotonic() - began < 10
        return ended[0]

    paused = asyncio.run(stop())
    assert isinstance(paused, PausedGroup)
    assert [sample.index for sample in paused.samples] == [0]
    assert recorded == [(7, paused, RewardStats())]
    prompt.columns.clear()
    runner.pause.clear()
    again = make_runner(SlowEngine(0.0), f"{HERE}:idle", limits={"episode_s": 0.3})
    resumed = asyncio.run(
        RolloutWorker(again.client, scorer, tokenizer, 60.0, print, again)._answer(task, 7, prompt, paused)
    )
    assert isinstance(resumed, SampleGroup)
    assert resumed.samples[0] is paused.samples[0]
    assert [(sample.index, sample.state) for sample in resumed.samples] == [(0, "completed"), (1, "timeout")]
