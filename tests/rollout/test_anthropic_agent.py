"""Agents that speak Anthropic's protocol by the anthropic package, where it is installed: their turns are episodes."""

from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rollout.protocol import Task
from tests.episode_page import read_example
from tests.episodes.test_chat import make_renderer
from tests.rollout.engineless import TextClient, counts, make_runner, roll_out

anthropic = pytest.importorskip("anthropic")
HERE = str(Path(__file__))
CALL = '[add]({"a": 3, "b": 4})'
TOKENIZER = make_renderer("qwen3", tools=True).tokenizer
TOOL: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def make_client(base_url: str, api_key: str) -> Any:
    return anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)


def text_client(*texts: str) -> TextClient:
    return TextClient(TOKENIZER, [f"{text}<|im_end|>" for text in texts])


def result_of(use: Any, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": text}]}


async def calling(task: Task, base_url: str, api_key: str) -> float:
    """Work as a harness does: count tokens, stream, run the tool, ask a sub-agent, come back with its answer."""
    async with make_client(base_url, api_key) as client:
        told: dict[str, Any] = {
            "model": "m",
            "max_tokens": 100,
            "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
            "tools": [TOOL],
        }
        messages: list[Any] = [*task.messages]
        fields = {name: value for name, value in told.items() if name != "max_tokens"}
        counted = await client.messages.count_tokens(messages=messages, **fields)
        async with client.messages.stream(messages=messages, **told) as stream:
            first = await stream.get_final_message()
        assert counted.input_tokens == first.usage.input_tokens
        assert [block.type for block in first.content] == ["text", "tool_use"]
        said, use = first.content
        assert (said.text, use.name, use.input, first.stop_reason) == ("sum:", "add", {"a": 3, "b": 4}, "tool_use")

        alone = await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
        assert ([block.text for block in alone.content], alone.stop_reason) == (["hello"], "end_turn")

        answers = [result_of(use, str(use.input["a"] + use.input["b"])), {"type": "text", "text": "Done?"}]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": answers}]
        second = await client.messages.create(messages=messages, **told)
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    return float(second.content[0].text)


async def refused(task: Task, base_url: str, api_key: str) -> None:
    """Send what no turn comes of, stop at a text, and pass the limit of turns."""
    async with make_client(base_url, api_key) as client:
        messages: list[Any] = [*task.messages]
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        for fields, sentence in (
            ({"messages": [{"role": "user", "content": [image]}]}, "messages.0.content"),
            ({"messages": []}, "messages"),
            ({"tools": [TOOL | {"input_schema": 7}]}, "tools.0.input_schema"),
            ({"max_tokens": 0}, "max_tokens"),
        ):
            with pytest.raises(anthropic.BadRequestError) as error:
                await client.messages.create(**{"model": "m", "max_tokens": 9, "messages": messages} | fields)
            assert error.value.body["error"]["type"] == "invalid_request_error"
            assert error.value.body["error"]["message"].startswith(sentence)
        with pytest.raises(anthropic.AuthenticationError, match="has ended"):
            await client.with_options(api_key=api_key[:-1]).messages.create(model="m", max_tokens=9, messages=messages)
        cut = await client.messages.create(model="m", max_tokens=9, messages=messages, stop_sequences=["never", "+"])
        assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("3", "stop_sequence", "+")
        with pytest.raises(anthropic.BadRequestError, match="no turn or no token left"):
            await client.messages.create(model="m", max_tokens=9, messages=messages)


def test_turns_tools_and_sub_agents_of_a_harness_are_trained_on_token_by_token() -> None:
    client = text_client(f"sum:{CALL}", "hello", "7")
    sample = roll_out(
        make_runner(client, "openai_agent", function_args={"agent": f"{HERE}:calling"}, tool_parser="qwen25")
    )
    assert (sample.error, sample.episode_reward) == ("", 7.0)
    assert counts(sample) == {"turns": 3, "forks": 1}
    (alone,) = sample.earlier
    assert TOKENIZER.decode(alone.tokens) == "hello<|im_end|>"
    sampled = [[*TOKENIZER.encode(text, add_special_tokens=False)] for text in (client.texts[0], client.texts[2])]
    own = [token for token, generated in zip(sample.tokens, sample.generated, strict=True) if generated]
    assert own == [*sampled[0], *sampled[1]]
    given = TOKENIZER.decode(
        [token for token, generated in zip(sample.tokens, sample.generated, strict=True) if not generated]
    )
    results = "<tool_response>\n7\n</tool_response>"
    assert results in given
    assert given.index(results) < given.index("Done?")
    prompt = TOKENIZER.decode(sample.prompt_tokens)
    assert "Add." in prompt
    assert "Add two numbers." in prompt


def test_what_no_turn_comes_of_is_refused_in_the_form_of_the_protocol() -> None:
    runner = make_runner(
        text_client("3+4"), "openai_agent", function_args={"agent": f"{HERE}:refused"}, limits={"turns": 1}
    )
    sample = roll_out(runner)
    assert (sample.state, sample.error, sample.metrics["turns"]) == ("truncated", "", 1)


def test_the_agent_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_example("An agent that speaks to Anthropic's protocol", tmp_path)
    monkeypatch.chdir(tmp_path)
    sample = roll_out(make_runner(text_client("yes"), **settings["rollout"]))
    assert (sample.error, sample.metrics["turns"], sample.episode_reward) == ("", 1, 0.0)
