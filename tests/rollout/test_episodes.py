"""Episodes on a real engine: what was sampled is what is trained on, over turns, whatever a function does."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.episodes.protocol import Episode, Policy, Task
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.types import Sample
from tests.rollout.conftest import Logprobs
from tests.test_extending import EXAMPLES

HERE = str(Path(__file__))
BOUND = 1e-4
Ask = Callable[[Callable[[EngineClient], Awaitable[Any]]], Any]


async def three_turns(task: Task, policy: Policy) -> Episode:
    messages = list(task.messages)
    for number in range(3):
        turn = await policy.generate(messages, max_tokens=6 + number)
        messages += [turn.message, {"role": "user", "content": f"more {number}"}]
    return policy.episode(reward=0.5, metrics={"said": 3}, state="completed").with_step_rewards([1, 2, 3])


async def one_answer(task: Task, policy: Policy) -> Episode:
    await policy.generate(tokens=task.prompt.tokens)
    return policy.episode()


async def forgetful(task: Task, policy: Policy) -> Episode:
    await policy.generate(task.messages, max_tokens=4)
    await policy.generate([{"role": "user", "content": "another"}], max_tokens=4)
    return policy.episode()


async def raising(task: Task, policy: Policy) -> Episode:
    if task.index == 0:
        raise KeyError("no such row")
    await policy.generate(task.messages, max_tokens=4)
    if task.index == 1:
        await asyncio.sleep(60)
    while True:
        await policy.generate(tokens=(*task.prompt.tokens, 1, 2, 3), max_tokens=4)


def generated(sample: Sample) -> list[int]:
    return [number for number, is_generated in enumerate(sample.generated) if is_generated]


def test_tokens_of_all_turns_have_the_logprobs_of_the_policy(
    roll_out: Callable[..., Any], model_folder: Path, expected_logprobs: Logprobs
) -> None:
    prompt, group = roll_out(f"{HERE}:three_turns")
    for sample in group.samples:
        assert sample.prompt_tokens == prompt.tokens
        sequence = [*sample.prompt_tokens, *sample.tokens]
        of_next = expected_logprobs(model_folder, sequence)[len(prompt.tokens) - 1 : -1]
        expected = of_next.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        places = generated(sample)
        assert (torch.tensor(sample.rollout_logprobs) - expected)[places].abs().max() < BOUND
        assert 0 < sample.given_tokens == len(sample.tokens) - len(places)
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(sequence) - 1
        assert sample.metrics == {"said": 3, "turns": 3, "forks": 0}
        assert [reward for _, reward in sample.step_rewards] == [1, 2, 3]
        assert sample.step_rewards[-1][0] == len(sample.tokens) - 1
        assert (sample.state, sample.episode_reward) == ("completed", 0.5)
    assert [message["role"] for message in group.samples[0].messages] == ["assistant", "user"] * 2 + ["assistant"]


def test_the_example_of_the_page(roll_out: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, settings = EXAMPLES["Rollout"]
    (tmp_path / "my_rollout.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    config = settings["rollout"] | {"limits": {"turn_tokens": 8}}
    _, group = roll_out("", answer="no such answer", **config)
    for sample in group.samples:
        assert sample.messages[1] == {"role": "user", "content": "No. Think again."}
        assert (sample.episode_reward, sample.metrics["second_guesses"]) == (0.0, 1)
        assert sample.metrics["turns"] == 2
    _, group = roll_out("", answer="", **config)
    assert [sample.episode_reward for sample in group.samples] == [1.0, 1.0]


def test_one_answer_is_what_the_engine_gives(roll_out: Callable[..., Any], ask: Ask) -> None:
    greedy = SamplingParams(12, temperature=0.0)
    prompt, group = roll_out(f"{HERE}:one_answer", sampling=greedy)
    (output,) = ask(lambda client: client.generate(prompt.tokens, greedy))
    for sample in group.samples:
        assert (sample.prompt_tokens, sample.tokens) == (prompt.tokens, output.tokens)
        assert sample.rollout_logprobs == pytest.approx(output.logprobs, abs=1e-5)  # the prompt is cached, or not
        assert sample.truncated == output.truncated
        assert all(sample.generated)


def test_a_conversation_that_does_not_go_on_is_a_fork(roll_out: Callable[..., Any]) -> None:
    prompt, group = roll_out(f"{HERE}:forgetful")
    assert [sample.metrics["forks"] for sample in group.samples] == [1, 1]
    assert all(sample.prompt_tokens != prompt.tokens and len(sample.tokens) <= 4 for sample in group.samples)


async def self_play(task: Task, policy: Policy) -> Episode:
    other, messages = policy.unrecorded(), [*task.messages]
    for _ in range(2):
        mine, _ = await asyncio.gather(
            policy.generate(messages, max_tokens=4), other.generate([{"role": "user", "content": "more"}], max_tokens=4)
        )
        messages += [mine.message, {"role": "user", "content": "Again."}]
    if task.index == 1:
        await asyncio.sleep(60)
    return policy.episode(metrics={"others": other.episode().turns})


def test_turns_of_a_second_handle_are_not_recorded(roll_out: Callable[..., Any]) -> None:
    prompt, group = roll_out(f"{HERE}:self_play", limits={"episode_s": 1.0, "turns": 2})
    played, slow = group.samples
    assert played.metrics == {"others": 2, "turns": 2, "forks": 0}
    assert played.prompt_tokens == prompt.tokens
    assert sum(played.generated) <= 8
    assert slow.state == "timeout"  # the clock runs again after turns of both at a time


def test_an_episode_that_fails_is_a_sample_with_a_state(roll_out: Callable[..., Any]) -> None:
    _, group = roll_out(f"{HERE}:raising", count=3, limits={"episode_s": 2.0, "turns": 2})
    failed, slow, long = group.samples
    assert [sample.state for sample in group.samples] == ["error", "timeout", "truncated"]
    assert (failed.generated, len(failed.tokens)) == ((False,), 1)
    assert failed.error == "prompt 4, sample 0, turn 0: it raised KeyError: 'no such row'"
    assert "turn 1: it took longer than rollout.limits.episode_s=2 s" in slow.error
    assert len(generated(slow)) == len(slow.tokens)
    assert long.truncated
    assert long.metrics["turns"] == 2


def test_a_group_of_episodes_past_its_limit_ends(roll_out: Callable[..., Any]) -> None:
    with pytest.raises(TimeoutError):
        roll_out(f"{HERE}:raising", count=2, limits={"episode_s": 60.0}, group_timeout_s=2.0)
