"""Conversations as data and agents bring them: with keys that say nothing, and several that go on by turns."""

import asyncio
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from openai import AsyncOpenAI
from pyarrow import parquet

from grpo_mp.algorithms.advantages import estimate_process
from grpo_mp.algorithms.settings import AdvantageConfig
from grpo_mp.batching.exchange import sample_infos
from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.prompts import load_prompts
from grpo_mp.rollout.client import SamplingParams
from grpo_mp.rollout.protocol import Episode, Policy, Task
from grpo_mp.utils.types import Prompt, SampleGroup
from tests.episodes.test_chat import make_renderer
from tests.rollout.engineless import TextClient, make_runner

HERE = str(Path(__file__))


def text_client(*texts: str) -> TextClient:
    return TextClient(make_renderer("qwen3", tools=False).tokenizer, [f"{text}<|im_end|>" for text in texts])


def roll_out(client: TextClient, function: str, prompt: Prompt | None = None, **config: Any) -> Any:
    """Roll out one episode of a function of this file."""
    name = "openai_agent" if "function_args" in config else f"{HERE}:{function}"
    runner = make_runner(client, name, **config)
    asked = prompt or Prompt(4, "?", runner.parts.renderer.prompt([ask("?")]), messages=(ask("?"),))
    (sample,) = asyncio.run(runner.run_group(asked, 7, 1, 1, SamplingParams(2000), None))
    return sample


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
    data = DataConfig(train="x", prompt_column="chat", answer_column=None)
    prompts = load_prompts(str(tmp_path / "rows.parquet"), data, client.tokenizer, 2000)
    del call["function"]["arguments"]["b"]  # type: ignore[index]
    assert [[*prompt.messages] for prompt in prompts] == [[ask("?")], asked]
    for prompt in prompts:
        sample = roll_out(client, "two_turns", prompt)
        assert (sample.state, sample.error) == ("completed", "")
        assert sample.metrics == {"turns": 2, "forks": 0}
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
        ("cancels", 1, "it raised SelfCancelledError: it raised CancelledError, and nobody had cancelled it"),
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


async def by_turns_in_ids(task: Task, policy: Policy) -> Episode:
    """A1 B1 A2 B2 A3 as ids, of which those of B begin as those of A do."""
    prompts = {"A": (5, 6), "B": (5, 6, 7)}
    for name in "ABABA":
        turn = await policy.generate(tokens=prompts[name])
        prompts[name] = (*prompts[name], *turn.tokens, 8)
    return policy.episode(reward=1.0)


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


TEXTS = [f"<think>thought {number}</think>answer {number}" for number in range(6)]


def test_conversations_go_on_by_turns() -> None:
    """The template would leave the thoughts out of what it renders anew."""
    client = text_client(*TEXTS)
    sample = roll_out(client, "by_turns")
    assert (sample.error, sample.metrics) == ("", {"turns": 6, "forks": 2})
    ids = [tuple(client.tokenizer.encode(text, add_special_tokens=False)) for text in client.texts]
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


def test_the_reward_of_a_turn_counts_for_the_turns_before_it_of_all_conversations() -> None:
    """Turns are A1 B1 A2 B2 A3 C, with rewards from 1 to 6: the advantage of turn n is the sum from n to 6."""
    sample = roll_out(text_client(*TEXTS), "by_turns")
    (info,) = sample_infos(SampleGroup(Prompt(4, "?", (1,)), (sample,)))
    advantage = AdvantageConfig(level="process", baseline="none", scale="none")
    (values,) = estimate_process([info], advantage, {})
    of_sequences = values.split([len(part.tokens) for part in sample.sequences])
    for part, own, numbers in zip(sample.sequences, of_sequences, [(2, 4), (1, 3, 5), (6,)], strict=True):
        found = [value for value, is_own in zip(own.tolist(), part.generated, strict=True) if is_own]
        assert [*dict.fromkeys(found)] == [sum(range(number, 7)) for number in numbers]
    in_one = roll_out(text_client(*TEXTS), "two_turns")
    assert [part.turn_ends for part in in_one.sequences] == [()]


def test_ids_go_on_by_turns_from_the_longest_that_they_begin_with() -> None:
    client = text_client(*TEXTS)
    sample = roll_out(client, "by_turns_in_ids")
    assert (sample.error, sample.metrics) == ("", {"turns": 5, "forks": 1})
    ids = [tuple(client.tokenizer.encode(text, add_special_tokens=False)) for text in client.texts]
    assert own_turns(sample) == [[ids[1], ids[3]], [ids[0], ids[2], ids[4]]]
    assert [part.prompt_tokens for part in sample.sequences] == [(5, 6, 7), (5, 6)]


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
    sample = roll_out(client, "", function_args={"agent": f"{HERE}:agent_with_broken_calls"}, tool_parser="test")
    assert (sample.error, sample.metrics) == ("", {"turns": 2, "forks": 0})
