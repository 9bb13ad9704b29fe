"""Rows of chats: what they become, which are refused by file and line, and which are left out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from grpo_mp.config.sft_settings import ChatDataConfig, SftConfig
from grpo_mp.data.chat_data import (
    ChatEncoder,
    ChatReader,
    ChatSet,
    load_held_out_chats,
    load_train_chats,
    read_chat,
)
from grpo_mp.data.cursor import Cursor, take
from grpo_mp.data.rows import Row
from grpo_mp.utils.errors import UserError
from tests.data.prompt_sets import write
from tools.tiny.models import make_tokenizer

ASK = {"role": "user", "content": "1+2?"}
ANSWER = {"role": "assistant", "content": "3"}
CHAT = {"messages": [ASK, ANSWER]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def encoder() -> ChatEncoder:
    tokenizer = make_tokenizer([])
    return ChatEncoder(tokenizer, "assistant", frozenset([tokenizer.eos_token_id]))


def load(path: Path, rows: Sequence[dict[str, Any]], data: dict[str, Any] | None = None, **sft: Any) -> ChatSet:
    config = ChatDataConfig(train=write(path, rows), **(data or {}))
    return load_train_chats(ChatReader(config, SftConfig(**{"batch_size": 1, "max_tokens": 64} | sft), encoder()))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"message": []}, "no column messages (did you mean message?), the row has"),
        ({"prompt": " ", "completion": "3"}, "column prompt: the prompt is empty"),
        ({"messages": []}, "column messages: expected a list of chat messages"),
        ({"messages": [ASK, {"role": "bot", "content": "3"}]}, "a message needs role (system, user, assistant, tool)"),
        ({"messages": [ASK, {"role": "assistant", "content": " "}]}, "an answer of the assistant is empty"),
        ({"messages": [ASK]}, "the chat has no answer of the assistant: nothing would be learned"),
        ({**CHAT, "tools": [1]}, "column tools: expected a list of JSON schemas, or its JSON"),
    ],
)
def test_bad_rows_are_refused_by_file_and_line(row: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load(tmp_path / "chats.jsonl", [CHAT, row])
    assert str(raised.value).startswith(f"{tmp_path / 'chats.jsonl'}, line 2")
    assert sentence in str(raised.value)


def test_prompt_and_completion_may_be_texts_or_messages(tmp_path: Path) -> None:
    """The same chat in each form; of a completion its answers are learned, of messages all."""
    rows = [
        {"prompt": "1+2?", "completion": "3"},
        {"prompt": [ASK], "completion": [ANSWER]},
        {"messages": [ASK, ANSWER]},
        {"prompt": [ASK, ANSWER, ASK], "completion": "3"},
        {"messages": [ASK, ANSWER, ASK, ANSWER]},
    ]
    samples = load(tmp_path / "chats.jsonl", rows)
    first, *same = (samples[i] for i in range(3))
    assert all((one.prompt_tokens, one.tokens) == (first.prompt_tokens, first.tokens) for one in same)
    assert samples.sizes[:, 1].tolist() == [2, 2, 2, 2, 4]  # a digit and the end of each answer
    assert samples[4].generated.count(False) == samples[4].given_tokens == 7  # <|user|>1+2?<|im_end|><|assistant|>
    decoded = encoder().tokenizer.decode(list(samples[3].prompt_tokens))
    assert decoded == "<|user|>1+2?<|im_end|><|assistant|>3<|im_end|><|user|>1+2?<|im_end|><|assistant|>"


def test_held_out_sets_are_measured(tmp_path: Path) -> None:
    rows = [{"prompt": "1+2?", "completion": digits} for digits in ("3", "3" * 64)]
    file = tmp_path / "chats.jsonl"
    expected = load(file, rows, {"system_prompt": "Add"})[0]
    data = ChatDataConfig(train=str(file), eval={"own": {"path": str(file)}, "other": str(file)}, system_prompt="Add")
    sets = load_held_out_chats(ChatReader(data, SftConfig(batch_size=1, max_tokens=64), encoder()))
    assert [(len(chats), chats.too_long) for chats in sets.values()] == [(1, 1)] * 2
    assert sets["own"][0].prompt_tokens == expected.prompt_tokens == sets["other"][0].prompt_tokens


def test_nulls_of_parquet_and_tools_as_json_are_read(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    chat = [ASK, call, {"role": "tool", "content": "3"}, ANSWER]
    Dataset.from_list([{"messages": chat, "tools": json.dumps([TOOL])}]).to_parquet(tmp_path / "chats.parquet")
    (row,) = Dataset.from_parquet(str(tmp_path / "chats.parquet"))
    read = read_chat(Row("here", row), ChatDataConfig(train="unused"))
    assert read.tools == (TOOL,)
    assert read.messages[1] == {**call, "content": ""}
    assert read.messages[0] == ASK


def test_what_becomes_of_samples_that_are_too_long(tmp_path: Path) -> None:
    long_answer = {"prompt": "1?", "completion": "5" * 20}
    long_prompt = {"prompt": "1" * 20, "completion": "5"}
    rows = [CHAT, long_answer, long_prompt]
    file = tmp_path / "chats.jsonl"
    kept = load(file, rows, max_tokens=12)
    assert (len(kept), kept.too_long) == (1, 2)
    assert kept.warnings == ("data.train: 2 of 3 chats are longer than sft.max_tokens=12, and left out",)
    cut = load(file, rows, max_tokens=12, too_long="truncate")
    assert (len(cut), cut.too_long, cut.sizes[:, 0].tolist()) == (2, 1, [9, 12])
    with pytest.raises(UserError, match=r"line 2: 26 tokens, sft.max_tokens=12: raise it, or set sft.too_long=drop"):
        load(file, rows, max_tokens=12, too_long="refuse")
    with pytest.raises(UserError, match=r"all 3 chats are longer than sft.max_tokens=3: raise it"):
        load(file, rows, max_tokens=3)


def test_a_mixture_has_its_sets_by_weight(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [CHAT] * 8)
    second = write(tmp_path / "b.jsonl", [CHAT] * 4)
    train = {"a": {"path": first}, "b": {"path": second, "weight": 2}}
    mixed = load_train_chats(ChatReader(ChatDataConfig(train=train), SftConfig(batch_size=1, max_tokens=64), encoder()))
    assert (len(mixed), mixed.epoch_size) == (12, 6)
    taken, _ = take(Cursor(), mixed.epoch_size, 6, shuffle=True, mixture=mixed.mixture)
    assert sorted(index >= 8 for index in taken) == [False] * 2 + [True] * 4
