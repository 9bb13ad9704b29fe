"""Conversations as data and agents bring them: with keys that say nothing, and several that go on by turns."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.prompts import load_prompts
from grpo_mp.episodes.protocol import Episode, Policy, Task
from grpo_mp.rollout.client import SamplingParams
from grpo_mp.types import Prompt
from tests.episodes.test_chat import make_renderer
from tests.rollout.engineless import TextClient, make_runner

HERE = str(Path(__file__))


def text_client(*texts: str) -> TextClient:
    return TextClient(make_renderer("qwen3", tools=False).tokenizer, [f"{text}<|im_end|>" for text in texts])


def roll_out(client: TextClient, function: str, prompt: Prompt | None = None, **config: Any) -> Any:
    """Roll out one episode of a function of this file."""
    runner = make_runner(client, f"{HERE}:{function}", **config)
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
