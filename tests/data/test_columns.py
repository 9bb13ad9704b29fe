"""Columns by name, and inside of others by dotted name."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.config.sft_settings import ChatDataConfig
from grpo_mp.data.chat_data import read_chat
from grpo_mp.data.prompts import PromptReader, PromptSet, load_train_prompts
from grpo_mp.data.rows import Row
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import has_column, read_column
from tools.tiny.models import make_tokenizer

TOKENIZER = make_tokenizer(["How", "many", "apples"])
ROW = {
    "a": 1,
    "b": {"c": 2, "d": {"e": None}, "f.g": 3},
    "b.c": 4,
    "h.i": {"j": 5},
    "list": [{"k": 6}, [7, 8]],
    "text": "0123",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("b.c", 4),
        ("b.d.e", None),
        ("b.f.g", 3),
        ("h.i.j", 5),
        ("list.0.k", 6),
    ],
)
def test_dotted_names_read_inside_of_columns(name: str, value: Any) -> None:
    assert has_column(ROW, name)
    assert read_column(ROW, name) == value


@pytest.mark.parametrize("name", ["a.b", "b.x", "list.2", "text.0"])
def test_what_is_not_there_is_missing(name: str) -> None:
    assert not has_column(ROW, name)
    with pytest.raises(KeyError):
        read_column(ROW, name)


def verl_file(folder: Path) -> str:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"How many apples? {number}+1"}],
            "ability": "math",
            "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
            "extra_info": {"index": number, "split": "train"},
        }
        for number in range(3)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return str(folder / "train.parquet")


def load(source: str, **columns: Any) -> PromptSet:
    return load_train_prompts(PromptReader(DataConfig(train=source, **columns), TOKENIZER, 100))


def test_a_parquet_file_of_verl_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = verl_file(tmp_path)
    prompts = load(source, prompt_column="prompt", answer_column="reward_model.ground_truth")
    assert [prompt.answer for prompt in prompts] == ["1", "2", "3"]
    assert [prompt.text for prompt in prompts] == [f"How many apples? {number}+1" for number in range(3)]
    by_index = load(source, prompt_column="prompt.0.content", answer_column="extra_info.index")
    assert [(prompt.text, prompt.answer) for prompt in by_index] == [(p.text, str(p.index)) for p in prompts]
    with pytest.raises(UserError, match="row 1: no column ground_truth, the row has:"):
        load(source, prompt_column="prompt", answer_column="ground_truth")
    with pytest.raises(UserError, match=r"expected an answer as text or number"):
        load(source, prompt_column="prompt", answer_column="reward_model")


def test_chats_are_read_inside_of_columns() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = Row("here", {"sample": {"chat": chat}, "tools": json.dumps([{"name": "f"}])})
    read = read_chat(row, ChatDataConfig(train="x", messages_column="sample.chat"))
    assert [*read.messages] == chat
    assert read.tools == ({"name": "f"},)
    split = Row("here", {"sample": {"asked": "a", "answered": "b"}})
    columns = ChatDataConfig(train="x", prompt_column="sample.asked", completion_column="sample.answered")
    assert [*read_chat(split, columns).messages] == chat
    with pytest.raises(UserError, match="no column chat"):
        read_chat(row, ChatDataConfig(train="x", messages_column="chat"))
