"""Files of data in the forms in which they are published, and under any name; columns, and what is inside of them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from grpo_mp.config.sft_settings import ChatDataConfig
from grpo_mp.data.chat_data import read_chat
from grpo_mp.data.rows import Row, read_rows
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import has_column, read_column
from tests.data.prompt_sets import load

ROWS = [{"question": "a", "answer": 1, "own": {"x": [1, None]}}, {"question": "b\nc", "other": "é"}]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
FILES = {
    "lines.jsonl": LINES,
    "lines.json": LINES,
    "indented.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "blank_before.JSON": b"\n  " + json.dumps(ROWS, indent=1).encode(),
    "byte_order_mark.json": json.dumps(ROWS).encode("utf-8-sig"),
}


@pytest.mark.parametrize("name", FILES)
def test_json_is_read_as_lines_or_as_one_array(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    rows = read_rows(str(tmp_path / name))
    assert [row.columns for row in rows] == ROWS
    assert rows[1].columns == ROWS[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"q": 1}, 3]', "a.json, row 2: expected an object with columns, found int"),
        (
            "a.json",
            b'[{"q": 1},\n {"q": ]',
            "not valid JSON .*line 2.* write one object a line, or one array of objects",
        ),
    ],
)
def test_what_is_no_rows_of_json_is_one_sentence(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_rows(str(tmp_path / name)))


@pytest.mark.parametrize("name", ["a*.parquet", "lr=[1e-6]/rows.parquet", "B.PARQUET"])
def test_the_parquet_file_that_is_named_is_read(name: str, tmp_path: Path) -> None:
    """Also where the name is a pattern that other files match."""
    for file in (name, "set1.parquet", "ab.parquet", "lr=1/rows.parquet"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table({"file": [file]}), tmp_path / file)
    assert [row.columns for row in read_rows(str(tmp_path / name))] == [{"file": name}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9085657\n")
    with pytest.raises(UserError, match=rf"{name}: a pointer of Git LFS.*git lfs pull"):
        read_rows(str(tmp_path / name))


ROW = {
    "a": 1,
    "b": {"c": 2, "d": {"e": None}, "f.g": 3},
    "b.c": 4,
    "h.i": {"j": 5},
    "list": [{"k": 6}, [7, 8]],
    "text": "0123",
}
INSIDE = [("b.c", 4), ("b.d.e", None), ("b.f.g", 3), ("h.i.j", 5), ("list.0.k", 6)]


@pytest.mark.parametrize(("name", "value"), INSIDE)
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


def test_a_parquet_file_of_verl_is_read(tmp_path: Path) -> None:
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
