"""Messages of data rows: calls of tools, fields that keep an answer from being learned, thinking."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.config.sft_settings import ChatDataConfig
from grpo_mp.data.chat_data import ChatEncoder, read_chat
from grpo_mp.data.prompts import PromptReader, load_train_prompts
from grpo_mp.data.rows import Row
from grpo_mp.data.template import as_template_reads, is_learned, read_message, thinking_texts
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message
from tests.episodes.test_chat import ANSWER, ASK, CALLING, RESULT, call_of, make_renderer, rendered
from tools.tiny.models import make_tokenizer

HUGGING_FACE: dict[str, Any] = {"content": "", "arguments": {"a": 1}}
OPENAI: dict[str, Any] = {"content": None, "arguments": '{"a": 1}'}
# What DeepSeek-R1's template has of calls: only beside a content that is null, and of arguments that are text.
BESIDE_NULL = (
    "{% for message in messages %}{% if message.role == 'assistant' and message.content is none %}"
    "{% for call in message.tool_calls %}{{ '<call>' + call.function.name + ' ' + call.function.arguments }}"
    "{% endfor %}{% else %}{{ '<' + message.role + '>' + message.content }}{% endif %}{% endfor %}"
)


def conversation(content: Any, arguments: Any) -> list[dict[str, Any]]:
    (call,) = call_of("qwen3")["tool_calls"]
    calls = [{**call, "function": {**call["function"], "arguments": arguments}}]
    return [ASK, {"role": "assistant", "content": content, "tool_calls": calls}, RESULT]


def load(folder: Path, chat: Any, tokenizer: Any) -> Any:
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": chat}))
    data = DataConfig(train=str(folder / "rows.jsonl"), prompt_column="prompt", answer_column=None)
    (prompt,) = load_train_prompts(PromptReader(data, tokenizer, 5000))
    return prompt


@pytest.mark.parametrize("form", [HUGGING_FACE, OPENAI], ids=["objects", "null"])
@pytest.mark.parametrize("name", CALLING)
def test_a_row_with_calls_is_rendered_as_the_template_takes_them(
    name: str, form: dict[str, Any], tmp_path: Path
) -> None:
    renderer = make_renderer(name, tools=False)
    prompt = load(tmp_path, conversation(**form), renderer.tokenizer)
    assert renderer.tokenizer.decode(prompt.tokens) == rendered(renderer, ASK, call_of(name), RESULT)
    assert [*prompt.messages] == conversation(**HUGGING_FACE)


def test_calls_are_learned_where_a_template_writes_them_beside_null_only() -> None:
    tokenizer = make_renderer("qwen3", tools=False).tokenizer
    tokenizer.chat_template = BESIDE_NULL
    chat = read_chat(Row("here", {"messages": conversation(**OPENAI)}), ChatDataConfig(train="unused"))
    learned = ChatEncoder(tokenizer, "assistant", frozenset()).render(chat)
    assert [learned.text[start:end] for start, end in learned.spans] == ['<call>add {"a": 1}']


def test_calls_that_a_template_never_writes_are_not_learned_in_silence() -> None:
    tokenizer = make_renderer("qwen3", tools=False).tokenizer
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    chat = read_chat(Row("here", {"messages": conversation(**OPENAI)}), ChatDataConfig(train="unused"))
    with pytest.raises(UserError, match="leaves out the assistant's call of add"):
        ChatEncoder(tokenizer, "assistant", frozenset()).render(chat)


@pytest.mark.parametrize(
    ("message", "role", "content"),
    [
        ({"from": "human", "value": "hi", "weight": 0}, "user", "hi"),
        ({"from": "user", "value": "hi", "role": None}, "user", "hi"),
        ({"role": "user", "content": [{"type": "text", "text": text} for text in ("one ", "two")]}, "user", "one two"),
    ],
)
def test_messages_of_sharegpt_and_lists_of_texts_are_messages(message: dict[str, Any], role: str, content: str) -> None:
    read = read_message(message, "rows.jsonl, line 1")
    assert (read["role"], read["content"]) == (role, content)
    assert read.get("weight") == message.get("weight")
    assert not {"from", "value"} & read.keys()


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"from": "observation", "value": "21"}, "role 'observation' and content '21'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "role 'user' and content .*image_url"),
    ],
)
def test_what_is_no_message_is_refused_by_what_it_is(message: dict[str, Any], found: str) -> None:
    with pytest.raises(UserError, match=rf"rows.jsonl, line 1: a message needs role \(.*found {found}"):
        read_message(message, "rows.jsonl, line 1")


@pytest.mark.parametrize(
    ("fields", "learned"),
    [
        ({}, True),
        ({"name": "Mia", "timestamp": 1}, True),
        ({"weight": 1}, True),
        ({"weight": 0}, False),
        ({"train": False}, False),
        ({"loss_mask": 0}, False),
        ({"step_loss_mask": 0}, False),
        ({"weight": 1, "train": False}, False),
        ({"pretrained": "x", "blossom": "y"}, True),
    ],
)
def test_switches_of_the_loss(fields: dict[str, Any], learned: bool) -> None:
    assert is_learned(ANSWER | fields) is learned


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("weight", 0.5, "weight of an answer must be true or false, or 1 or 0, not '0.5'"),
        ("loss_mask", [0, 1], "loss_mask of an answer must be"),
    ],
)
def test_switches_that_cannot_be_read_are_refused(field: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("[", r"\[")):
        is_learned(ANSWER | {field: value})


def test_thinking_is_said_beside_the_content() -> None:
    assert thinking_texts(ANSWER | {"thinking": "hm", "plan": "one", "weight": 0, "reasoning": None}) == [
        ("thinking", "hm")
    ]


def test_thinking_is_given_in_the_field_that_templates_write() -> None:
    tokenizer = make_tokenizer([])
    ask: Message = {"role": "user", "content": "How many?"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        thinks = {**ANSWER, name: "hm"}
        assert as_template_reads([ask, thinks], tokenizer) == [ask, {**ANSWER, "reasoning_content": "hm"}]
    both = {**ANSWER, "reasoning": "other", "reasoning_content": "hm"}
    assert as_template_reads([both], tokenizer) == [both]
    of_user: Message = {"role": "user", "content": "?", "thinking": "hm"}
    assert as_template_reads([of_user], tokenizer) == [of_user]
