"""What every start says of the sets: what is left out, and which set limits an epoch."""

import json
from pathlib import Path
from typing import Any

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.cursor import mix_sets
from grpo_mp.data.prompts import load_eval_prompts, load_train_prompts
from grpo_mp.data.set_checks import smallest_set, too_few
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
    evals = load_eval_prompts(config, TOKENIZER, limit)
    return [*load_train_prompts(config, TOKENIZER, limit).warnings], [*evals["held"].warnings]


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
    mixture = mix_sets((40, 3, 90), (1, 1, 1))
    smallest = smallest_set("data.train", ("big", "tiny", "other"), mixture)
    assert too_few("a, b, c", 9, "prompts", "rollout.prompts_per_step=16", smallest) == (
        "a, b, c: 9 prompts fit, a step takes rollout.prompts_per_step=16, limited by the 3 of data.train.tiny: give "
        "that more rows or a lower weight"
    )
    weighted = mix_sets((40, 3, 90), (1, 0.05, 9))
    assert smallest_set("data.train", ("big", "tiny", "other"), weighted) == "the 90 of data.train.other"
    assert too_few("a", 1, "samples", "sft.batch_size=4", smallest_set("data.train", ("x",), ())) == (
        "a: 1 samples fit, a step takes sft.batch_size=4"
    )
