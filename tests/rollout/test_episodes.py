"""Episodes on a real engine: what was sampled is what is trained on, over turns, whatever a function does."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mp.algorithms.advantages import EPS, estimate_process
from grpo_mp.algorithms.settings import AdvantageConfig
from grpo_mp.batching.exchange import sample_infos
from grpo_mp.monitor.samples import sample_record
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rollout.episodes import with_failures
from grpo_mp.rollout.protocol import Episode, Policy, Task
from grpo_mp.utils.types import EpisodeState, Prompt, Sample, SampleGroup
from tests.rollout.conftest import Logprobs
from tests.rollout.engineless import TextClient, counts, make_prompt, make_runner, roll_out_virtually
from tests.test_extending import EXAMPLES
from tools.tiny.products import tokenizer as calculator_tokenizer

HERE = str(Path(__file__))
BOUND = 1e-4


async def three_turns(task: Task, policy: Policy) -> Episode:
    messages = list(task.messages)
    for number in range(3):
        turn = await policy.generate(messages, max_tokens=6 + number)
        messages += [turn.message, {"role": "user", "content": f"more {number}"}]
    return policy.episode(reward=0.5, metrics={"said": 3}, state="completed").with_step_rewards([1, 2, 3])


async def raising(task: Task, policy: Policy) -> Episode:
    if task.index == 0:
        raise KeyError("no such row")
    await policy.generate(task.messages, max_tokens=4)
    if task.index == 1:
        await asyncio.sleep(60)
    while True:
        await policy.generate(task.messages, max_tokens=4)


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
        assert counts(sample) == {"said": 3, "turns": 3, "forks": 0}
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


async def self_play(task: Task, policy: Policy) -> Episode:
    other = policy.unrecorded()
    messages = [*task.messages]
    for _ in range(2):
        mine, _ = await asyncio.gather(
            policy.generate(messages, max_tokens=4), other.generate([{"role": "user", "content": "more"}], max_tokens=4)
        )
        messages += [mine.message, {"role": "user", "content": "Again."}]
    if task.index == 1:
        await asyncio.sleep(60)
    return policy.episode(metrics={"others": other.episode().turns})


def test_turns_of_a_second_handle_are_not_recorded() -> None:
    client = TextClient(calculator_tokenizer(), ["7<|im_end|>"], 5.0)
    runner = make_runner(client, f"{HERE}:self_play", limits={"episode_s": 1.0, "turns": 2})
    played, slow = roll_out_virtually(runner, 2)
    assert played.metrics == {"others": 2, "turns": 2, "forks": 0, "turn_s": 5.0}
    assert played.prompt_tokens == make_prompt(runner).tokens
    assert sum(played.generated) == 4  # of 8: each answer has two
    assert slow.state == "timeout"  # the clock runs again after turns of both at a time


async def both_roles(task: Task, policy: Policy) -> Episode:
    """Both sides ask the same question; index 1 rewards one of them only."""
    mine = [*task.messages]
    theirs = [*task.messages]
    for _ in range(2):
        mine.append((await policy.generate(mine, max_tokens=4)).message)
        theirs.append((await policy.generate(theirs, max_tokens=4, role="judge")).message)
        mine.append({"role": "user", "content": "Again."})
        theirs.append({"role": "user", "content": "Again."})
    rewards = {"": 1.0, "judge": 0.25, "absent": 3.0}
    return policy.episode(0.5).with_role_rewards(rewards if task.index == 0 else {"": 1.0})


def test_each_role_has_a_sequence_and_a_reward_at_its_last_turn() -> None:
    client = TextClient(calculator_tokenizer(), ["7<|im_end|>"])
    played, wrong = roll_out_virtually(make_runner(client, f"{HERE}:both_roles"), 2)
    (mine,) = played.earlier
    assert [(one.role, one.step_rewards) for one in played.sequences] == [
        ("", ((len(mine.tokens) - 1, 1.0),)),
        ("judge", ((len(played.tokens) - 1, 0.25),)),
    ]
    own = [[one.tokens[place] for place in generated(one)] for one in played.sequences]
    assert [*map(client.tokenizer.decode, own)] == ["7<|im_end|>" * 2] * 2
    assert counts(played) == {"turns": 4, "forks": 0}
    shown = sample_record(SampleGroup(Prompt(4, "", (1,)), (played,)), played)["messages"]
    spoken = [("assistant", "7"), ("user", "Again."), ("assistant", "7")]
    assert [(one["of"], one["role"], one["content"]) for one in shown] == [
        (of, *said) for of in ("", "judge") for said in spoken
    ]
    assert "no reward of the role 'judge': give one for each role with turns" in wrong.error


def test_an_episode_that_fails_is_a_sample_with_a_state() -> None:
    client = TextClient(calculator_tokenizer(), ["7<|im_end|>"], 0.5)
    samples = roll_out_virtually(make_runner(client, f"{HERE}:raising", limits={"episode_s": 2.0, "turns": 2}), 3)
    failed, slow, long = samples
    assert [sample.state for sample in samples] == ["error", "timeout", "truncated"]
    assert (failed.generated, len(failed.tokens)) == ((False,), 1)
    assert failed.error == "prompt 4, sample 0, turn 0: it raised KeyError: 'no such row'"
    assert "turn 1: it took longer than rollout.limits.episode_s=2 s" in slow.error
    assert len(generated(slow)) == len(slow.tokens)
    assert long.truncated
    assert long.metrics["turns"] == 2


@pytest.mark.parametrize(("failed", "rewards"), [(-1.0, [-1.0, -1.0, 0.5]), ("mask", [0.5] * 3), ("score", [0.5] * 3)])
def test_what_failed_has_the_reward_of_the_settings(failed: float | str, rewards: list[float]) -> None:
    states: tuple[EpisodeState, ...] = ("error", "timeout", "truncated")
    samples = tuple(Sample(0, i, (1,), (2,), (0.0,), (0,), False, reward=0.5, state=s) for i, s in enumerate(states))
    group = with_failures(SampleGroup(Prompt(0, "", (1,)), samples), failed)
    assert [sample.reward for sample in group.samples] == rewards


class Crowd:
    """Counts the episodes beside each, at the end of each."""

    def __init__(self) -> None:
        self.running = 0

    async def __call__(self, task: Task, policy: Policy) -> Episode:
        self.running += 1
        await asyncio.sleep(0.1)
        most = self.running
        self.running -= 1
        return policy.episode(metrics={"running": most})


def test_episodes_in_flight_are_bounded() -> None:
    """By the four slots of the runner."""
    samples = roll_out_virtually(make_runner(TextClient(calculator_tokenizer(), [""]), f"{HERE}:Crowd"), 9)
    assert max(sample.metrics["running"] for sample in samples) == 4


async def stubborn(task: Task, policy: Policy) -> Episode:
    """Never ends: it takes what stops it for a passing error."""
    while True:
        with suppress(Exception):
            await policy.generate(task.messages, max_tokens=2)


async def leaving(task: Task, policy: Policy) -> Episode:
    await policy.generate(task.messages, max_tokens=2)
    sys.exit("no more rows")


async def wrongly_scored(task: Task, policy: Policy) -> Episode:
    wrong: Any = [{"reward": float("nan")}, {"reward": "good"}, {"metrics": {"speed": "fast"}}]
    await policy.generate(task.messages, max_tokens=2)
    if task.index < len(wrong):
        return policy.episode(**wrong[task.index])
    return policy.episode().with_step_rewards([1.0] * (task.index - 3) * 2)


@pytest.mark.parametrize(
    ("function", "state", "error"),
    [
        ("stubborn", "timeout", "it took longer than rollout.limits.episode_s=1 s"),
        ("leaving", "error", "it raised RuntimeError: it raised SystemExit('no more rows')"),
    ],
)
def test_a_function_that_would_stop_the_rank_ends_its_episode(
    roll_out: Callable[..., Any], function: str, state: str, error: str
) -> None:
    _, group = roll_out(f"{HERE}:{function}", count=1, limits={"episode_s": 1.0, "turns": 1})
    (sample,) = group.samples
    assert sample.state == state
    assert error in sample.error


def test_an_episode_with_a_reward_that_is_none_is_an_error(roll_out: Callable[..., Any]) -> None:
    _, group = roll_out(f"{HERE}:wrongly_scored", count=5)
    assert {sample.state for sample in group.samples} == {"error"}
    for sample, sentence in zip(
        group.samples,
        [
            "ValueError: the reward is nan: a reward is a finite number, or None",
            "ValueError: the reward is 'good': a reward is a finite number, or None",
            "TypeError: the metric speed is 'fast': a metric is a number, by its name",
            "ValueError: 0 rewards for 1 generated segments: give one for each turn",
            "ValueError: 2 rewards for 1 generated segments: give one for each turn",
        ],
        strict=True,
    ):
        assert sample.error.endswith(sentence)


async def scored_turns(task: Task, policy: Policy) -> Episode:
    """Has one turn more than its index, the last of them worth most."""
    messages = list(task.messages)
    for _ in range(task.index + 1):
        turn = await policy.generate(messages, max_tokens=4)
        messages += [turn.message, {"role": "user", "content": "more"}]
    return policy.episode().with_step_rewards([task.index + 0.5 * turn for turn in range(task.index + 1)])


def test_each_turn_has_an_advantage_of_its_own(roll_out: Callable[..., Any]) -> None:
    """Those of the turn and of all after it: sums of normalized rewards, DeepSeekMath section 4.1.3, in float64."""
    _, group = roll_out(f"{HERE}:scored_turns", count=3)
    scored = Scorer(RewardConfig(steps="episode"), max_response_tokens=60).score_group(group)
    process = AdvantageConfig(level="process")
    actual = estimate_process(sample_infos(scored), process, {})
    rewards = [[0.0], [1.0, 1.5], [2.0, 2.5, 3.0]]
    flat = np.concatenate(rewards)
    for sample, of_turns, values in zip(group.samples, rewards, actual, strict=True):
        normal = (np.array(of_turns) - flat.mean()) / (flat.std(ddof=1) + EPS)
        to_go = normal[::-1].cumsum()[::-1]
        starts = [place for place in generated(sample) if place == 0 or not sample.generated[place - 1]]
        turn_of = np.searchsorted(starts, generated(sample), side="right") - 1
        assert len(starts) == len(of_turns)
        np.testing.assert_allclose(values.numpy()[generated(sample)], to_go[turn_of], rtol=1e-12)


def test_a_group_of_episodes_past_its_limit_ends(roll_out: Callable[..., Any]) -> None:
    with pytest.raises(TimeoutError):
        roll_out(f"{HERE}:raising", count=2, limits={"episode_s": 60.0}, group_timeout_s=2.0)
