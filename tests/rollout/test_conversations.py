"""Conversations as data and agents bring them: with keys that say nothing, several by turns, and those that fork."""

import ast
import asyncio
import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from openai import AsyncOpenAI
from pyarrow import parquet

from grpo_mp.batching.step_batch import with_kl_in_reward
from grpo_mp.config import load_settings
from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.prompts import PromptReader, load_train_prompts
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.rewards.scorer import RewardStats, Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rollout import journal
from grpo_mp.rollout.dump import read_groups, write_groups
from grpo_mp.rollout.episode_policy import split_thinking
from grpo_mp.rollout.groups import oldest_version
from grpo_mp.rollout.protocol import Episode, Policy, Task
from grpo_mp.rollout.sglang_source import source_folder
from grpo_mp.utils.types import Prompt, Sample, SampleGroup
from tests.conftest import TinyRun
from tests.episodes.test_chat import make_renderer
from tests.rollout import engineless
from tests.rollout.engineless import TextClient, counts, make_runner
from tests.trainer.one_step import make_batch

HERE = str(Path(__file__))
TOOLS = "tests.rollout.light_tools"
K1_IN_REWARD = ["algorithm.kl.estimator=k1", "algorithm.kl.apply_to=reward"]
TEXTS = [f"<think>thought {number}</think>answer {number}" for number in range(6)]


def text_client(*texts: str) -> TextClient:
    return TextClient(make_renderer("qwen3", tools=False).tokenizer, [f"{text}<|im_end|>" for text in texts])


def roll_out(client: TextClient, function: str, prompt: Prompt | None = None, **config: Any) -> Sample:
    """Roll out one episode of a function of this file, or one that has a name."""
    name = f"{HERE}:{function}" if function in globals() else function
    return engineless.roll_out(make_runner(client, name, **config), prompt)


def sampled_ids(client: TextClient) -> list[tuple[int, ...]]:
    return [tuple(client.tokenizer.encode(text, add_special_tokens=False)) for text in client.texts]


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def two_turns(task: Task, policy: Policy) -> Episode:
    """Sends the messages as clients do that write null for what there is not."""
    first = await policy.generate(task.messages)
    answer = {"tool_calls": None, "name": None} | first.message
    await policy.generate([*task.messages, answer, {**ask("more"), "tool_calls": None}])
    return policy.episode(reward=1.0)


def test_a_row_of_parquet_has_nulls_and_its_conversation_goes_on(tmp_path: Path) -> None:
    """Each message has every key that any message of the file has."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = [ask("1+?"), answer, {"role": "tool", "content": "3", "tool_call_id": "1"}]
    parquet.write_table(pa.Table.from_pylist([{"chat": [ask("?")]}, {"chat": asked}]), tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet")["chat"].to_pylist()[0][0]["tool_calls"] is None
    client = text_client("one", "two")
    data = DataConfig(train=str(tmp_path / "rows.parquet"), prompt_column="chat", answer_column=None)
    prompts = load_train_prompts(PromptReader(data, client.tokenizer, 2000))
    del call["function"]["arguments"]["b"]  # type: ignore[index]
    assert [[*prompt.messages] for prompt in prompts] == [[ask("?")], asked]
    for prompt in prompts:
        sample = roll_out(client, "two_turns", prompt)
        assert (sample.state, sample.error) == ("completed", "")
        assert counts(sample) == {"turns": 2, "forks": 0}
        assert client.tokenizer.decode(sample.tokens).count("more") == 1


async def cancels(task: Task, policy: Policy) -> Episode:
    """Awaits what it has cancelled."""
    await policy.generate(task.messages)
    work = asyncio.create_task(asyncio.sleep(60))
    work.cancel()
    await work
    return policy.episode()


async def cancels_itself(task: Task, policy: Policy) -> Episode:
    await policy.generate(task.messages)
    own = asyncio.current_task()
    assert own
    own.cancel()
    await asyncio.sleep(60)
    return policy.episode()


@pytest.mark.parametrize(
    ("function", "turns", "error"),
    [
        ("cancels", 0, "its function cancelled its own task"),
        ("cancels_itself", 0, "its function cancelled its own task"),
    ],
)
def test_a_cancellation_that_nobody_asked_for_ends_its_episode_only(function: str, turns: int, error: str) -> None:
    sample = roll_out(text_client("one"), function)
    assert (sample.state, sample.metrics["turns"]) == ("error", turns)
    assert sample.error.endswith(error)


async def by_turns(task: Task, policy: Policy) -> Episode:
    """Two conversations: A1 B1 A2 B2 A3, then one that goes on from none; thoughts are sent back as they came."""
    chats = {name: [ask(f"I am {name}")] for name in "ABC"}
    for name in "ABABAC":
        turn = await policy.generate(chats[name])
        chats[name] += [turn.message, ask(f"more {name}")]
    return policy.episode(reward=1.0).with_step_rewards([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def own_turns(sample: Any) -> list[list[tuple[int, ...]]]:
    """By sequence, the runs of tokens that were generated."""
    return [
        [
            tuple(token for token, _ in run)
            for is_own, run in groupby(zip(part.tokens, part.generated, strict=True), key=lambda pair: pair[1])
            if is_own
        ]
        for part in sample.sequences
    ]


def test_conversations_go_on_by_turns() -> None:
    """The template would leave the thoughts out of what it renders anew."""
    client = text_client(*TEXTS)
    sample = roll_out(client, "by_turns")
    assert (sample.error, counts(sample)) == ("", {"turns": 6, "forks": 2})
    ids = sampled_ids(client)
    assert own_turns(sample) == [[ids[1], ids[3]], [ids[0], ids[2], ids[4]], [ids[5]]]  # B, A, C
    of_b, of_a, of_c = sample.sequences
    assert client.tokenizer.decode(of_a.prompt_tokens).count("I am A") == 1
    for part, numbers in ((of_b, (1, 3)), (of_a, (0, 2, 4)), (of_c, (5,))):
        sequence = (*part.prompt_tokens, *part.tokens)
        ends = [len(client.prompts[number]) + len(ids[number]) for number in numbers]
        for number, end in zip(numbers, ends, strict=True):  # each was sampled after what it is trained on after
            assert sequence[:end] == (*client.prompts[number], *ids[number])
        own = [
            (version, logprob)
            for version, logprob, is_own in zip(
                part.weight_versions, part.rollout_logprobs, part.generated, strict=True
            )
            if is_own
        ]
        assert [*dict.fromkeys(own)] == [(number + 1, -0.5 * (number + 1)) for number in numbers]
        starts = len(part.prompt_tokens)
        assert part.step_rewards == tuple(
            (end - starts - 1, number + 1.0) for number, end in zip(numbers, ends, strict=True)
        )
    assert sample.messages[-1]["content"] == TEXTS[5]


LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object", "properties": {}}}
WRITTEN = ["{broken", "[1, 2]", '{"a": "é"}']  # arguments of calls


async def agent_with_broken_calls(task: Task, base_url: str, api_key: str) -> None:
    """Sends calls back as it got them, whatever they are."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [ask("?")]
        tools: list[Any] = [{"type": "function", "function": LOOK}]
        message = (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0].message
        calls: list[Any] = message.tool_calls or []
        assert [call.function.arguments for call in calls] == WRITTEN
        results = [{"role": "tool", "tool_call_id": call.id, "content": "no"} for call in calls]
        await client.chat.completions.create(model="m", messages=[*messages, message, *results], tools=tools)


def test_arguments_that_are_no_object_reach_the_agent_as_they_were_written() -> None:
    """What comes back of them is the same conversation."""
    client = text_client("".join(f"[look]({arguments})" for arguments in WRITTEN), "done")
    sample = roll_out(
        client, "openai_agent", function_args={"agent": f"{HERE}:agent_with_broken_calls"}, tool_parser="test"
    )
    assert (sample.error, counts(sample)) == ("", {"turns": 2, "forks": 0})


async def without_thoughts(task: Task, policy: Policy) -> Episode:
    """Takes the thoughts out of the history, as agents do that show only answers; the last turn goes on."""
    messages = list(task.messages)
    for number in range(2):
        turn = await policy.generate(messages)
        shown = {"role": "assistant", "content": turn.text.partition("</think>")[2]}
        messages += [shown, {"role": "user", "content": f"more {number}"}]
    turn = await policy.generate(messages)
    return policy.episode(reward=1.0).with_step_rewards([1.0, 2.0, 3.0])


def test_every_sampled_token_is_trained_on_once_after_what_it_was_sampled_after() -> None:
    client = text_client(*TEXTS[:3])
    sample = roll_out(client, "without_thoughts")
    assert (sample.state, counts(sample)) == ("completed", {"turns": 3, "forks": 2})
    assert [part.prompt_tokens for part in sample.sequences] == client.prompts
    assert [part.tokens for part in sample.sequences] == sampled_ids(client)
    for number, part in enumerate(sample.sequences, start=1):
        assert all(part.generated)
        assert part.step_rewards == ((len(part.tokens) - 1, number),)
        assert set(part.rollout_logprobs) == {-0.5 * number}
        assert set(part.weight_versions) == {number}
        assert part.verify_steps == number
    assert [part.part for part in sample.sequences] == [1, 2, 0]
    assert [part.key for part in sample.sequences] == [(7, 0, 1), (7, 0, 2), (7, 0)]
    assert oldest_version(SampleGroup(Prompt(0, "", (1,)), (sample,)), 9) == 1
    scored = Scorer(RewardConfig(steps="episode"), 60).score_group(SampleGroup(Prompt(0, "", (1,)), (sample,)))
    assert scored.samples[0].reward_terms["steps"] == 2.0  # of all three turns


async def two_requests(task: Task, base_url: str, api_key: str) -> list[float]:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(2):  # the second is no continuation of the first
            await client.chat.completions.create(model="m", messages=[*task.messages])  # type: ignore[list-item]
    return [0.5, 2.0] if task.index == 0 else []


def test_an_agent_rewards_each_turn_of_all_sequences() -> None:
    sample = roll_out(text_client(*TEXTS), "openai_agent", function_args={"agent": f"{HERE}:two_requests"})
    assert (sample.error, sample.episode_reward, sample.metrics["forks"]) == ("", None, 1)
    assert [reward for part in sample.sequences for _, reward in part.step_rewards] == [0.5, 2.0]


def make_sample(index: int, reward: float, *responses: int, group_id: int = 3) -> Sample:
    """A sample whose sequences have so many response tokens, the first of each given but for one-token ones."""
    *earlier, last = [
        Sample(
            group_id,
            index,
            prompt_tokens=(9, 8) if number == 1 else (9, 8, number),
            tokens=tuple(range(1, count + 1)),
            rollout_logprobs=(-0.25,) * count,
            weight_versions=(number,) * count,
            truncated=False,
            generated=(count == 1, *(True,) * (count - 1)),
            step_rewards=((count - 1, float(number)),),
            part=number if number < len(responses) else 0,
            state="completed",
            reward=reward if number == len(responses) else 0.0,
            routed_experts=np.full((count + 1, 2, 2), number, np.uint8),
        )
        for number, count in enumerate(responses, start=1)
    ]
    return replace(last, earlier=tuple(earlier))


def make_group(group_id: int = 3) -> SampleGroup:
    samples = ((0, 1.0, 4, 1, 6), (1, 0.0, 5), (2, 0.5, 3, 2))
    made = tuple(make_sample(*sample, group_id=group_id) for sample in samples)
    return SampleGroup(Prompt(5, "?", (9, 8)), made)


def same_experts(first: SampleGroup, second: SampleGroup) -> bool:
    pairs = zip(first.samples, second.samples, strict=True)
    parts = [pair for ours, theirs in pairs for pair in zip(ours.sequences, theirs.sequences, strict=True)]
    return all(np.array_equal(a.routed_experts, b.routed_experts) for a, b in parts)  # type: ignore[arg-type]


def test_dump_and_journal_give_the_sequences_back(tmp_path: Path) -> None:
    group = make_group()
    other = make_group(4)
    write_groups(tmp_path / "x", [group, other], {3}, "")
    assert read_groups(tmp_path / "x") == [(group, True), (other, False)]
    assert same_experts(read_groups(tmp_path / "x")[0][0], group)
    assert parquet.read_table(tmp_path / "x")["part"].to_pylist() == [1, 2, 0, 0, 1, 0] * 2
    payload = journal.encode(3, group, RewardStats(), kept=True)
    decoded = journal.decode(payload, group.prompt)
    assert decoded == (group, RewardStats())
    assert isinstance(decoded[0], SampleGroup)
    assert same_experts(decoded[0], group)


def weights_of(updates: Any) -> dict[int, tuple[list[float], list[float]]]:
    """By sequence of the step, the loss weights and advantages of its generated tokens."""
    found = {}
    for update, batches in updates:
        for batch in batches:
            for number, sequence in enumerate(batch.sample_ids):
                own = (batch.sequence_index == number) & batch.mask.bool()
                found[update.samples[sequence]] = batch.loss_weights[own].tolist(), batch.advantages[own].tolist()
    return found


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [  # generated tokens: 3 + 1 + 5, 4, 2 + 1 of the samples of each group
        ("token_mean", [1 / 16] * 3),
        ("sequence_mean", [1 / 27, 1 / 12, 1 / 9]),
        ("sequence_sum", [1 / 3] * 3),
    ],
)
@pytest.mark.parametrize("share", ["true", "false"])
def test_a_forked_episode_is_one_sample_of_its_group_and_of_the_loss(
    tiny_run: TinyRun, parallel: Parallel, aggregation: str, weights: list[float], share: str
) -> None:
    """Advantages are of three rewards, not of six; the weights of an update sum up as those of three responses do."""
    settings = load_settings(
        tiny_run.config,
        [
            *("layout.expert=1", "training.updates_per_step=2", f"training.share_prompts={share}"),
            *(f"algorithm.aggregation={aggregation}", "algorithm.advantage.scale=none", "training.shuffle=true"),
        ],
    )
    batch = make_batch(settings, parallel, [make_group(), make_group(4)], moe_layers=(0, 1))
    assert batch.sample_of == (0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 5, 5)
    rewards = np.array([1.0, 0.0, 0.5])
    expected = (rewards - rewards.mean()).tolist() * 2
    assert [len({batch.sample_of[i] for i in update.samples}) for update in batch.plan] == [3, 3]
    assert all(
        {i for i, of in enumerate(batch.sample_of) if of == batch.sample_of[first]} <= set(update.samples)
        for update in batch.plan
        for first in update.samples
    )
    found = weights_of(zip(batch.plan, batch.updates, strict=True))
    counts = {i: len(values) for i, (values, _) in found.items()}
    assert [counts[i] for i in range(6)] == [3, 1, 5, 4, 2, 1]
    for i, (values, advantages) in found.items():
        assert advantages == [pytest.approx(expected[batch.sample_of[i]])] * counts[i]
        if aggregation != "token_mean":  # whose denominator depends on which samples an update drew
            assert values == [pytest.approx(weights[batch.sample_of[i] % 3])] * counts[i]
    for update in batch.plan:
        total = sum(sum(found[i][0]) for i in update.samples)
        tokens = sum(counts[i] for i in update.samples)
        assert total == pytest.approx(tokens / 3 if aggregation == "sequence_sum" else 1.0)


@pytest.mark.parametrize("is_scored", [True, False])
def test_the_kl_of_all_sequences_counts_against_the_reward(
    tiny_run: TinyRun, parallel: Parallel, is_scored: bool
) -> None:
    """A sample without a reward has an advantage of 0."""
    settings = load_settings(tiny_run.config, [*K1_IN_REWARD, "layout.expert=1", "algorithm.advantage.scale=none"])
    algorithm = settings.algorithm.model_copy(update={"old_logprobs": "engine"})
    group = make_group()
    first, second, third = group.samples
    if not is_scored:
        group = replace(group, samples=(first, replace(second, reward=50.0, is_scored=False), third))
    batch = make_batch(settings, parallel, [group])
    updates = [[replace(mb, reference_logprobs=mb.rollout_logprobs - 1) for mb in update] for update in batch.updates]
    updates = with_kl_in_reward(updates, batch, algorithm, 0.1, parallel)
    rewards = np.array([1.0 - 0.9, 0.0 - 0.4, 0.5 - 0.3])  # k1 is 1 a token
    half = (rewards[0] - rewards[2]) / 2
    expected = rewards - rewards.mean() if is_scored else np.array([half, 0.0, -half])
    for i, (_, advantages) in weights_of(zip(batch.plan, updates, strict=True)).items():
        assert advantages == [pytest.approx(expected[batch.sample_of[i]])] * len(advantages)


def test_an_episode_with_two_results() -> None:
    """The prompt of the second turn is the first with the ids that were sampled, and both results, none of them trained
    on; the call that cannot be read is told to the policy."""
    texts = ['<think>why</think>[rows]({"a": 2}) [look]({broken)<|im_end|>', "<think>so</think>2<|im_end|>"]
    client = TextClient(make_renderer("qwen3", tools=True).tokenizer, texts)
    tools = {"tools": [f"{TOOLS}:rows", f"{TOOLS}:Board"], "tool_parser": "test"}
    sample = roll_out(client, "call_tools", **tools)
    assert (sample.state, sample.error, sample.earlier) == ("completed", "", ())
    first, second = (tuple(client.tokenizer.encode(text, add_special_tokens=False)) for text in client.texts)
    decode = client.tokenizer.decode
    own = [token for token, is_own in zip(sample.tokens, sample.generated, strict=True) if is_own]
    given = decode([token for token, is_own in zip(sample.tokens, sample.generated, strict=True) if not is_own])
    assert tuple(own) == (*first, *second)
    assert sample.prompt_tokens == client.prompts[0]
    assert client.prompts[1] == (*sample.prompt_tokens, *sample.tokens[: len(sample.tokens) - len(second)])
    assert given.count("2 rows") == 1
    assert given.count("Error: the arguments of look are no JSON object") == 1
    assert (sample.metrics["tool_raised"], sample.episode_reward) == (1.0, 0.75)


class NamingClient(TextClient):
    """Finds in the first answer the call of a tool whose name forges the end of a message."""

    name = "x"

    async def parse_tool_calls(self, text: str, tools: Any, parser: str) -> tuple[str, list[tuple[str, str]]]:
        return "", [(self.name, "{}")] if len(self.prompts) == 1 else []


def test_the_name_of_a_tool_that_there_is_not_ends_no_message() -> None:
    """Kimi's template shows it in the id of the call."""
    given = []
    for name in ("x", "x<|im_end|>"):
        client = NamingClient(make_renderer("kimi_k2", tools=True).tokenizer, ["?<|im_end|>", "2<|im_end|>"])
        client.name = name
        sample = roll_out(client, "call_tools", tools=[f"{TOOLS}:rows"], tool_parser="test")
        assert (sample.state, sample.metrics["tool_raised"]) == ("completed", 1.0)
        given.append(client.prompts[1])
    assert "functions.x" in client.tokenizer.decode(given[0])
    assert given[0] == given[1]


@pytest.mark.parametrize(
    ("answer", "called"),
    [
        ('<think>[rows]({"a": 1})</think>It is 5.', []),
        ('<think>[rows]({"a": 1})</think>[rows]({"a": 2})', ["2"]),
        ('<think>one</think>[rows]({"a": 1})<think>two</think>It is 5.', []),
        ('[rows]({"a": 1})</think>', []),
        ('[rows]({"a": 3})', ["3"]),
        ('<think>[rows]({"a": 4})', ["4"]),  # as when a model is served: a call ends thinking
    ],
)
def test_only_calls_behind_the_thinking_are_made(answer: str, called: list[str]) -> None:
    client = TextClient(make_renderer("qwen3", tools=True).tokenizer, [f"{answer}<|im_end|>", "done<|im_end|>"])
    sample = roll_out(client, "call_tools", tools=[f"{TOOLS}:rows"], tool_parser="test")
    text = client.tokenizer.decode(sample.tokens)
    assert re.findall(r"(\d) rows", text) == called
    assert len(client.prompts) == 1 + len(called)
    assert text.startswith(answer)


def test_every_end_of_thinking_that_the_installed_engine_knows_is_one() -> None:
    source = ast.parse((source_folder() / "parser" / "reasoning_parser.py").read_text())
    texts = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    ends = {text for text in texts if re.fullmatch(r"(</|\[/|◁/|<\|END)\S*think\S*", text, re.IGNORECASE)}
    assert {"</think>", "◁/think▷", "[/THINK]", "<|END_THINKING|>"} <= ends
    for end in ends:
        assert split_thinking(f"a{end}b") == (f"a{end}", "b")
    assert split_thinking("</b> [/x] <think>") == ("", "</b> [/x] <think>")
