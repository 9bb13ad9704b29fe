"""Agents that speak OpenAI's Responses API: their turns are those of chat completions, token by token."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from grpo_mp.rollout.openai_responses import as_events, read_response_request, response
from grpo_mp.rollout.protocol import Task, ToolCall, Turn
from grpo_mp.utils.types import Sample
from tests.episodes.test_chat import make_renderer
from tests.rollout.engineless import TextClient, make_runner, roll_out

HERE = str(Path(__file__))
END = "<|im_end|>"
TEXTS = [f'I look.[add]({{"a": 1}})[add]({{"a": 2}}){END}', f"Three.{END}", f"Surely.{END}"]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}
RULES = "Be short."
POLICY: Any = SimpleNamespace(temperature=1.0, top_p=1.0)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def connect(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def by_chat(task: Task, base_url: str, api_key: str) -> float:
    """What the agents below are compared with."""
    messages: list[Any] = [{"role": "system", "content": RULES}, *task.messages]
    async with connect(base_url, api_key) as client:
        create = client.chat.completions.create
        first = (await create(model="m", messages=messages, tools=[CHAT_TOOL])).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "r"} for call in first.tool_calls or ()]
        messages += [first, *results]
        messages.append((await create(model="m", messages=messages, tools=[CHAT_TOOL])).choices[0].message)
        messages.append({"role": "user", "content": "Sure?"})
        await create(model="m", messages=messages, tools=[CHAT_TOOL], max_tokens=50)
    return 1.0


async def by_items(task: Task, base_url: str, api_key: str) -> float:
    """Sends the whole conversation each time, as items; checks what it is answered."""
    fixed: Any = {"model": "m", "instructions": RULES, "tools": [TOOL]}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": task.messages[0]["content"]}]}]
    async with connect(base_url, api_key) as client:
        first = await client.responses.create(input=items, **fixed)
        assert (first.status, first.output_text) == ("completed", "I look.")
        calls = [item for item in first.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [("add", '{"a": 1}'), ("add", '{"a": 2}')]
        assert first.usage
        assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
        items += [item.model_dump() for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "r"} for call in calls]
        second = await client.responses.create(input=items, **fixed)
        items += [item.model_dump() for item in second.output]
        items.append({"role": "user", "content": "Sure?"})
        third = await client.responses.create(input=items, max_output_tokens=50, temperature=1.0, **fixed)
        assert [(answer.status, answer.output_text) for answer in (second, third)] == [
            ("completed", "Three."),
            ("completed", "Surely."),
        ]
    return 1.0


async def by_ids(task: Task, base_url: str, api_key: str) -> float:
    """Sends what is new, after the id of the answer before; the client puts the events of a stream together."""
    fixed: Any = {"model": "m", "instructions": RULES, "tools": [TOOL]}
    async with connect(base_url, api_key) as client:
        async with client.responses.stream(input=task.messages[0]["content"], **fixed) as stream:
            kinds = [event.type async for event in stream]
            first = await stream.get_final_response()
        assert kinds.count("response.output_item.done") == 3
        assert kinds[-1] == "response.completed"
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "r"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await client.responses.create(input=results, previous_response_id=first.id, **fixed)
        async with client.responses.stream(input="Sure?", previous_response_id=second.id, **fixed) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert deltas == ["Surely."]
    return 1.0


def play(agent: str, limits: dict[str, Any] | None = None, **columns: Any) -> Sample:
    client = TextClient(make_renderer("qwen3", tools=False).tokenizer, TEXTS)
    args = {"agent": f"{HERE}:{agent}"}
    config = {"function_args": args, "tool_parser": "test", "limits": limits or {}}
    return roll_out(make_runner(client, "openai_agent", **config), **columns)


@pytest.mark.parametrize("agent", ["by_items", "by_ids"])
def test_the_turns_are_those_of_chat_completions(agent: str) -> None:
    expected, sample = play("by_chat"), play(agent)
    assert (sample.state, sample.error, sample.episode_reward) == ("completed", "", 1.0)
    assert sample.metrics == expected.metrics
    assert (sample.metrics["turns"], sample.metrics["forks"]) == (3, 0)
    assert (sample.prompt_tokens, sample.tokens, sample.generated) == (
        expected.prompt_tokens,
        expected.tokens,
        expected.generated,
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": []}, "input must be a text, or a list with one item or more"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "an item of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "must be text"),
        ({"tools": [{"type": "web_search"}]}, "tools must be a list of functions: no other tools are here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1': no answer of this episode has it"),
        ({"conversation": "conv_1"}, "conversation: nothing is kept here"),
        ({"background": True}, "background=true"),
        ({"max_output_tokens": 0}, "max_output_tokens must be whole numbers"),
        ({"temperature": 0.5}, "temperature=0.5: all turns are sampled as the run says"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format="),
        ({"text": {"verbosity": "low"}}, 'text.verbosity="low"'),
        (
            {"reasoning": {"effort": "high", "summary": None}},
            'reasoning={"effort": "high", "summary": null}: all turns',
        ),
        ({"include": ["message.output_text.logprobs"]}, 'include=["message.output_text.logprobs"]'),
        ({"truncation": "auto"}, 'truncation="auto": all turns are sampled as the run says: leave it out or set'),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens: give max_output_tokens, as it is named here"),
        ({"extra_body": {"min_tokens": 5}}, "min_tokens: no turn here can follow this parameter"),
    ],
)
def test_what_no_turn_comes_of_is_refused(fields: dict[str, Any], sentence: str) -> None:
    sample = play("refused", fields=fields, sentence=sentence)
    assert (sample.error, sample.state, sample.metrics["turns"]) == ("", "completed", 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "include": ["reasoning.encrypted_content"], "metadata": {"run": "1"}, "user": "me"},
        {"store": True, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3},
        {"reasoning": {"effort": None, "summary": None}, "truncation": "disabled", "text": {"verbosity": "medium"}},
    ],
)
def test_what_clients_send_by_themselves_is_accepted(fields: dict[str, Any]) -> None:
    expected = read_response_request({"input": "?"}, {}, POLICY)
    assert read_response_request({"input": "?", **fields}, {}, POLICY) == expected
    assert not expected[0].ignored


def test_what_no_turn_can_follow_is_ignored_where_the_settings_say_so() -> None:
    body = {"input": "?", "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "min_tokens": 5, "store": False}
    request, _ = read_response_request(body, {}, POLICY, ignores_sampling=True)
    assert set(request.ignored) == {"reasoning", "text.verbosity", "min_tokens"}


async def refused(task: Task, base_url: str, api_key: str) -> float:
    """Asks for what it cannot have, and then for a turn."""
    columns: Any = task.prompt.columns
    async with connect(base_url, api_key) as client:
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(**{"model": "m", "input": "?"} | columns["fields"])
        body: Any = error.value.body
        assert columns["sentence"] in body["message"]
        await client.responses.create(model="m", input="?")
    return 1.0


async def too_long(task: Task, base_url: str, api_key: str) -> float:
    """Is cut, goes on, and passes its limit."""
    async with connect(base_url, api_key) as client:
        await client.responses.create(model="m", input="?")
        with pytest.raises(openai.BadRequestError) as ended:
            await client.responses.create(model="m", input="?")
        assert ended.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key=api_key[:-1]).responses.create(model="m", input="?")
    return 0.5


def test_limits_and_keys_are_those_of_the_endpoint() -> None:
    sample = play("too_long", limits={"turns": 1})
    assert (sample.error, sample.state, sample.episode_reward) == ("", "truncated", 0.5)


@pytest.mark.parametrize("finished", [True, False])
def test_answers_and_events_are_what_the_client_library_knows(finished: bool) -> None:
    """Strictly: its own client takes what it does not know without a word."""
    calls = (ToolCall("add", {"a": 1}, "functions.add:0"),) if finished else ()
    turn = Turn((1, 2, 3), (-0.5,) * 3, (0,) * 3, "I look.", finished, calls)
    body = {"input": "?", "tools": [TOOL], "max_output_tokens": 3}
    request, messages = read_response_request(body, {}, POLICY)
    assert messages == ({"role": "user", "content": "?"},)
    answer = response(turn, 5, request, POLICY)
    read = Response.model_validate(answer)
    reason = read.incomplete_details.reason if read.incomplete_details else None
    assert (read.status, reason) == (("completed", None) if finished else ("incomplete", "max_output_tokens"))
    assert read.usage
    assert (read.usage.input_tokens, read.usage.output_tokens, read.usage.total_tokens) == (5, 3, 8)
    blocks = [block.split("\n") for block in as_events(answer).strip().split("\n\n")]
    events = [EVENT.validate_json(data.removeprefix("data: ")) for _, data in blocks]
    assert [f"event: {event.type}" for event in events] == [name for name, _ in blocks]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == ("response.completed" if finished else "response.incomplete")
