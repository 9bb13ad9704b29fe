"""What every start says of the sets: what is left out, and which set limits an epoch."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.cursor import mix_sets
from grpo_mp.data.prompts import PromptReader, load_eval_prompts, load_train_prompts
from grpo_mp.data.sets import DataSet
from grpo_mp.utils.errors import UserError
from tools.tiny.models import make_tokenizer

TOKENIZER = make_tokenizer(["How", "many", "apples"])


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def said(
    folder: Path, rows: list[dict[str, Any]], limit: int = 100, max_prompts: int | None = None, **data: Any
) -> tuple[list[str], list[str]]:
    """Return the warnings of the rows as a set of a mixture to train on, and as a set to evaluate on."""
    other = write(folder / "other.jsonl", [{"question": "How", "answer": "1"}])
    source = write(folder / "rows.jsonl", rows)
    config = DataConfig(
        train={"all": source, "other": other}, eval={"held": {"path": source, "max_prompts": max_prompts}}, **data
    )
    reader = PromptReader(config, TOKENIZER, limit)
    return [*load_train_prompts(reader).warnings], [*load_eval_prompts(reader)["held"].warnings]


def rows_of(*questions: str) -> list[dict[str, Any]]:
    return [{"question": text, "answer": "1", "extra_info": {"index": i}} for i, text in enumerate(questions)]


def test_prompts_that_are_too_long_are_said(tmp_path: Path) -> None:
    rows = rows_of("1", "2" * 30, "3", "4" * 31)
    train, held = said(tmp_path, rows, limit=20)
    assert train == ["data.train.all: 2 of 4 prompts are longer than rollout.max_prompt_tokens=20, and left out"]
    assert held == ["data.eval.held: 2 of 4 prompts are longer than rollout.max_prompt_tokens=20, and count as wrong"]
    assert said(tmp_path, rows) == ([], [])


def test_the_set_that_limits_an_epoch_is_named() -> None:
    """Of sets of 40, 3 and 90 with equal weights, an epoch has 3 of each."""
    items, names = range(133), ("big", "tiny", "other")
    for weights, sentence in (
        (
            (1, 1, 1),
            "a step takes rollout.prompts_per_step=200, limited by the 3 of data.train.tiny",
        ),
        ((1, 0.05, 9), "limited by the 90 of data.train.other: give that more rows or a lower weight"),
    ):
        mixed = DataSet[int]("a, b", [items], mixture=mix_sets((40, 3, 90), weights))
        with pytest.raises(UserError, match=sentence):
            mixed.check_size("rollout.prompts_per_step", 200, "prompts", names)
    DataSet[int]("a", [items]).check_size("sft.batch_size", 133, "samples", ("x",))
    with pytest.raises(UserError, match=r"a: 133 samples fit, a step takes sft.batch_size=134$"):
        DataSet[int]("a", [items]).check_size("sft.batch_size", 134, "samples", ("x",))
