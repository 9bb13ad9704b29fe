"""When episodes end: their clock, and what is left of a group when a step or the run does; without an engine."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.client import SamplingParams
from grpo_mp.rollout.episodes import EpisodeGroup
from grpo_mp.rollout.groups import PausedGroup, RunningGroup
from grpo_mp.rollout.journal import GroupJournal, journal_file, load, read_records
from grpo_mp.rollout.protocol import Episode, Policy, Task
from grpo_mp.rollout.worker import RolloutTask, RolloutWorker, pause_running
from grpo_mp.utils.types import Sample, SampleGroup
from tests.rollout.engineless import TextClient, make_prompt, make_runner, roll_out_virtually
from tools.tiny.products import tokenizer as calculator_tokenizer

HERE = str(Path(__file__))
WORDS = calculator_tokenizer()


def engine(seconds: float) -> TextClient:
    return TextClient(WORDS, ["6<|im_end|>"], seconds)


def test_the_clock_of_an_episode_stands_still_while_its_turns_are_generated() -> None:
    """Each turn takes longer than the episode may, and so does the engine's parser of its calls."""
    tools = {"tools": ["tools.tiny.calculator:calculator"], "tool_parser": "pythonic"}
    runner = make_runner(engine(1.2), "call_tools", limits={"episode_s": 1.0}, **tools)
    (sample,) = roll_out_virtually(runner, 1)
    assert (sample.state, sample.error, sample.metrics["turns"]) == ("completed", "", 1)
    (slow,) = roll_out_virtually(make_runner(engine(0.1), f"{HERE}:idle", limits={"episode_s": 0.2}), 1)
    assert (slow.state, slow.metrics["turns"]) == ("timeout", 1)


def test_a_group_whose_episodes_have_all_been_recorded_waits_for_none() -> None:
    """As where a lost engine recorded one while another drew it again, and the job was killed before its scores."""
    runner = make_runner(engine(0.0), "call_tools")
    prompt = make_prompt(runner)

    async def roll_out_twice() -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
        group = EpisodeGroup(prompt, 7, 2, 1, SamplingParams(2000), None)
        samples = await runner.run_group(group)
        return samples, await asyncio.wait_for(runner.run_group(group, samples), 60.0)

    samples, again = asyncio.run(roll_out_twice())
    assert len(samples) == 2
    assert again == samples


async def idle(task: Task, policy: Policy) -> Episode:
    """Index 0 ends; the others wait for something that is no engine."""
    await policy.generate(task.messages)
    if task.index or "idle" not in task.prompt.columns:
        await asyncio.sleep(3600)
    return policy.episode(metrics={"step": task.step})


def test_a_stop_ends_episodes_that_wait_for_something_else_and_keeps_what_had_ended(tmp_path: Path) -> None:
    """What is resumed has the episode that had ended, which is on disk since then, and rolls out the other again."""
    runner = make_runner(engine(0.0), f"{HERE}:idle")
    prompt = make_prompt(runner)
    recorded = list[Any]()
    prompt.columns["idle"] = True
    scorer: Any = SimpleNamespace()
    tokenizer: Any = WORDS
    worker = RolloutWorker(runner.client, scorer, tokenizer, 600.0, print, runner)
    journal = GroupJournal(tmp_path, 0)
    task = RolloutTask(
        *(lambda _: prompt, 2, 7, 1, SamplingParams(60)),
        record=lambda *group: recorded.append(group),
        record_part=lambda group_id, group: journal.append(1, group_id, group, RewardStats(), kept=False),
    )
    killed = list[Any]()

    async def stop() -> Any:
        group = asyncio.create_task(worker._generate_group(task, 7, prompt, None, None))
        file = journal_file(tmp_path, 1, 0)
        while not (file.exists() and read_records(file)):
            await asyncio.sleep(0.05)
        # A job that is killed now leaves this.
        killed.extend(load(record, prompt) for record in read_records(file))
        ended = await pause_running(runner.client, {0: RunningGroup(group)}, runner.pause)
        return ended[0]

    paused = asyncio.run(stop())
    assert isinstance(paused, PausedGroup)
    assert [sample.index for sample in paused.samples] == [0]
    assert recorded == [(7, paused, RewardStats())]
    assert killed == [(paused, RewardStats())]
    prompt.columns.clear()
    runner.pause.clear()
    again = make_runner(engine(0.0), f"{HERE}:idle", limits={"episode_s": 0.3})
    resumed = asyncio.run(
        RolloutWorker(again.client, scorer, tokenizer, 60.0, print, again)._answer(task, 7, prompt, paused)
    )
    assert isinstance(resumed, SampleGroup)
    assert resumed.samples[0] is paused.samples[0]
    assert [(sample.index, sample.state) for sample in resumed.samples] == [(0, "completed"), (1, "timeout")]
