"""What every start says of the sets: what is left out, and which set limits an epoch."""

from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.cursor import mix_sets
from grpo_mp.data.prompts import PromptReader, load_eval_prompts, load_train_prompts
from grpo_mp.data.sets import DataSet, overlap_warnings
from grpo_mp.utils.errors import UserError
from tests.data.prompt_sets import TOKENIZER, write
from tools.tiny.models import make_tokenizer


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


SILENT = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"


def test_a_template_that_leaves_out_the_system_prompt_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["How"])
    source = write(tmp_path / "rows.jsonl", rows_of("1"))
    data = {"train": source, "system_prompt": "Think."}
    assert len(load_train_prompts(PromptReader(DataConfig(**data), tokenizer, 100))) == 1
    tokenizer.chat_template = SILENT
    with pytest.raises(UserError, match=r"data\.system_prompt: the chat template leaves out system messages"):
        load_train_prompts(PromptReader(DataConfig(**data), tokenizer, 100))
    assert len(load_train_prompts(PromptReader(DataConfig(train=source), tokenizer, 100))) == 1


def test_problems_of_eval_sets_in_the_train_data_are_said(tmp_path: Path) -> None:
    train = rows_of("2 + 3", "Tom has 3 eggs.", "a well-known sum", "1,000 nuts", "x-1")
    same = ["Tom  has\n3 EGGS", "A well known sum", "\uff11,000 nuts"]
    other = ["2 - 3", "Tom has 4 eggs", "x+1", "1 000 nuts"]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "x-1"}]
    sources = {
        "same": write(tmp_path / "same.jsonl", rows_of(*same, *other)),
        "other": write(tmp_path / "other.jsonl", [*rows_of(*other), {"question": chat, "answer": "1"}]),
    }
    data = DataConfig(
        train=write(tmp_path / "train.jsonl", train), eval={name: {"path": path} for name, path in sources.items()}
    )
    reader = PromptReader(data, TOKENIZER, 100)
    warnings = list(overlap_warnings(load_train_prompts(reader), load_eval_prompts(reader)))
    assert warnings == ["data.eval.same: 3 of 7 problems are also in data.train"]


def test_the_set_that_limits_an_epoch_is_named() -> None:
    """Of sets of 40, 3 and 90 with equal weights, an epoch has 3 of each."""
    items = range(133)
    names = ("big", "tiny", "other")
    for weights, sentence in (
        ((1, 1, 1), "a step takes rollout.prompts_per_step=200, limited by the 3 of data.train.tiny"),
        ((1, 0.05, 9), "limited by the 90 of data.train.other: give that more rows or a lower weight"),
    ):
        mixed = DataSet[int]("a, b", [items], mixture=mix_sets((40, 3, 90), weights))
        with pytest.raises(UserError, match=sentence):
            mixed.check_size("rollout.prompts_per_step", 200, "prompts", names)
    DataSet[int]("a", [items]).check_size("sft.batch_size", 133, "samples", ("x",))
    with pytest.raises(UserError, match=r"a: 133 samples fit, a step takes sft.batch_size=134$"):
        DataSet[int]("a", [items]).check_size("sft.batch_size", 134, "samples", ("x",))
