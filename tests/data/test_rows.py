"""Files of data in the forms in which they are published, and under any name."""

import json
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from grpo_mp.data.rows import read_rows
from grpo_mp.utils.errors import UserError

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
