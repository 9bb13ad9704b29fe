"""The digest of a train set: any change of what it says changes it, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.prompts import PromptReader, load_train_prompts
from tests.data.test_prompts import TOKENIZER

ROWS = [{"question": f"{i}+1?", "answer": str(i + 1), "level": i} for i in range(6)]


def digest(folder: Path, *sets: list[dict[str, Any]], **settings: Any) -> str:
    train = {}
    for number, rows in enumerate(sets):
        file = folder / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        train[f"set{number}"] = {"path": str(file)}
    limit = settings.pop("limit", 100)
    data = DataConfig(train=train, prompt_column="question", answer_column="answer", **settings)
    return load_train_prompts(PromptReader(data, TOKENIZER, limit)).digest


CHANGES = {
    "answer": [*ROWS[:5], ROWS[5] | {"answer": "7"}],
    "column_of_a_reward": [*ROWS[:5], ROWS[5] | {"level": 9}],
    "row_more": [*ROWS, ROWS[0]],
    "order": ROWS[::-1],
}


@pytest.mark.parametrize("rows", CHANGES.values(), ids=CHANGES)
def test_a_changed_row_changes_it(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert digest(tmp_path, rows) != digest(tmp_path, ROWS)
    assert digest(tmp_path, ROWS, rows) != digest(tmp_path, ROWS, ROWS)


def test_what_is_made_of_rows_changes_it(tmp_path: Path) -> None:
    assert digest(tmp_path, ROWS, system_prompt="Count.") != digest(tmp_path, ROWS)
    long = [*ROWS, {"question": "7 " * 40, "answer": "7", "level": 0}]
    assert digest(tmp_path, long, limit=30) != digest(tmp_path, long)
    assert digest(tmp_path, ROWS, ROWS[:3]) != digest(tmp_path, ROWS[:3], ROWS)


def test_the_same_rows_have_the_same_wherever_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert digest(tmp_path / "other", ROWS) == digest(tmp_path, ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    train = {"set0": {"path": str(tmp_path / "rows.parquet")}}
    data = DataConfig(train=train, prompt_column="question", answer_column="answer")
    assert load_train_prompts(PromptReader(data, TOKENIZER, 100)).digest == digest(tmp_path, ROWS)
