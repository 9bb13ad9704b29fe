"""Files of chats that give nothing to learn from."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config.sft_settings import ChatDataConfig, SftConfig
from grpo_mp.data.chat_data import ChatSet, load_train_chats
from grpo_mp.data.supervised import ChatEncoder
from tests.bad_input.doors import NO_TEXT, NOT_FILES, Content, answers, as_nobody, noise, put, refused, tree
from tools.tiny.models import make_tokenizer

CHAT_TEMPLATE = (  # which writes calls of tools
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOKENIZER = make_tokenizer(["How", "many", "apples"], CHAT_TEMPLATE, roles=("<|tool|>",))
ASK, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "3"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def row(**columns: Any) -> bytes:
    return json.dumps(columns).encode() + b"\n"


GOOD = b"".join(
    row(messages=[ASK, ANSWER, ASK, CALL, {"role": "tool", "content": "3"}, ANSWER], tools=TOOLS) for _ in range(4)
)
FILES: dict[str, Content] = {
    **NOT_FILES,
    **NO_TEXT,
    "empty": b"",
    "an empty line": GOOD + b"\n",
    "cut": GOOD[:-10],
    "a list": b"[1, 2]\n",
    "null": row(messages=None),
    "a number": row(messages=3),
    "a chat of lists": row(messages=[["user", "x"]]),
    "a message of a list as role": row(messages=[{"role": ["user"], "content": "x"}, ANSWER]),
    "a message of no content": row(messages=[ASK, {"role": "assistant"}]),
    "calls that are none": row(messages=[ASK, {"role": "assistant", "tool_calls": []}]),
    "no answer": row(messages=[ASK]),
    "a completion that is null": row(prompt="x", completion=None),
    "a completion of the user": row(prompt="x", completion=[ASK]),
    "tools that are no JSON": row(messages=[ASK, ANSWER], tools="{"),
    "tools that are a section": row(messages=[ASK, ANSWER], tools={"name": "add"}),
    "half a character in a call": row(messages=[ASK, {**CALL, "content": "x\ud800"}]),
    "only chats that are too long": row(prompt="x" * 200, completion="3"),
    "a bad row at the end": GOOD * 300 + row(messages=[ASK]),
}


def load(file: Path) -> ChatSet:
    encoder = ChatEncoder(TOKENIZER, "assistant", frozenset([TOKENIZER.eos_token_id]))
    return load_train_chats(ChatDataConfig(train=str(file)), SftConfig(batch_size=1, max_tokens=190), encoder)


@pytest.mark.parametrize("name", FILES)
def test_json_lines(name: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = put(tmp_path / "chats.jsonl", FILES[name])
    before = tree(tmp_path)
    with as_nobody(name):
        assert str(file) in refused(lambda: load(file))
    assert tree(tmp_path) == before


def test_noise_in_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    assert len(load(put(file, GOOD))) == 4
    for content in noise(GOOD, count=100, seed=1):
        samples = answers(lambda content=content: load(put(file, content)))
        assert samples is None or (samples.learned > 0).all()
