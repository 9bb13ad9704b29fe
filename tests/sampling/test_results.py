"""What is made of recorded answers: parts of any number of ranks, counts, pass rates that training reads."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from grpo_mp.algorithms.evaluation import pass_at_k
from grpo_mp.data.prompts import read_pass_rates
from grpo_mp.data.rows import Row
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.journal import GroupJournal
from grpo_mp.trainer.sampling.filters import load_sample_filters
from grpo_mp.trainer.sampling.results import (
    GROUPS,
    PARTS,
    PASS_RATES,
    SAMPLES,
    Counts,
    PartWriter,
    join,
    recorded_share,
    share_of_prompts,
    sum_counts,
)
from grpo_mp.trainer.sampling.table import Source
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Prompt
from tests.sampling.groups import answer, group_of

ANSWERS = 4
PROMPTS = [Prompt(number, f"question {number}", (number,), str(number)) for number in range(10)]
FILTERS = {"right": {}, "best": {"k": 1}}


def right(prompt: int, index: int) -> bool | None:
    """Nothing is said of the last prompt; of the others the number says how many are right."""
    return None if prompt == 9 else index < prompt % 5


def record(folder: Path, prompts: range = range(10)) -> None:
    """By three ranks, in another order than that of the prompts."""
    for prompt in sorted(prompts, key=lambda number: number * 7 % 10):
        samples = [
            answer(index, 1 + index, PROMPTS[prompt], is_correct=right(prompt, index), reward=float(index))
            for index in range(ANSWERS)
        ]
        stats = RewardStats(failures=Counter(judge=1))
        journal = GroupJournal(folder / GROUPS, prompt % 3)
        assert journal.append(prompt // 4, prompt, group_of(*samples, prompt=PROMPTS[prompt]), stats, kept=True)


def finish(folder: Path, ranks: int) -> tuple[Counts, list[dict[str, Any]], str]:
    filters, source = load_sample_filters(FILTERS, ANSWERS, True), Source("x", "a", "b", None)
    recorded = {key: value for rank in range(ranks) for key, value in recorded_share(folder, rank, ranks).items()}
    counts = [
        PartWriter(folder, rank, PROMPTS, filters, source, None).write(share_of_prompts(recorded, rank, ranks))
        for rank in range(ranks)
    ]
    join(folder, ranks, False, "{}")
    assert not (folder / PARTS).exists()
    return sum_counts(counts), parquet.read_table(folder / SAMPLES).to_pylist(), (folder / PASS_RATES).read_text()


@pytest.mark.parametrize("ranks", [1, 2, 3, 12])
def test_any_number_of_ranks_writes_the_same(tmp_path: Path, ranks: int) -> None:
    record(tmp_path)
    counts, rows, rates = finish(tmp_path, ranks)
    best = [(prompt, prompt % 5 - 1) for prompt in range(9) if prompt % 5]  # the last right one has the highest reward
    assert [(row["prompt_index"], row["index"]) for row in rows] == best
    assert [json.loads(line)["prompt_index"] for line in rates.splitlines()] == list(range(9))
    summary = counts.to_dict()
    rights = [prompt % 5 for prompt in range(9)]
    assert summary["accuracy"] == pytest.approx(sum(rights) / 36)
    assert summary["pass_at"] == {
        k: pytest.approx(sum(pass_at_k(ANSWERS, right, k) for right in rights) / 9) for k in (1, 2, 4)
    }
    assert summary["dropped"] == {"right": 40 - sum(rights), "best": sum(rights) - 7}
    named = ("answered_prompts", "samples", "kept", "kept_prompts", "reward", "tokens", "truncated_ratio")
    assert [summary[name] for name in named] == [10, 40, 7, 7, 1.5, 2.5, 0.0]
    assert summary["rewards"]["failures"] == {"judge": 10}


def test_training_reads_the_pass_rates(tmp_path: Path) -> None:
    record(tmp_path)
    finish(tmp_path, 2)
    rates = read_pass_rates(str(tmp_path / PASS_RATES))
    assert rates == {f"question {prompt}": prompt % 5 / ANSWERS for prompt in range(9)}


def test_a_record_that_was_cut_is_left_out(tmp_path: Path) -> None:
    record(tmp_path)
    file = tmp_path / GROUPS / "step_000002" / "rank_0.journal"
    file.write_bytes(file.read_bytes()[:-3])
    assert sorted(recorded_share(tmp_path, 0, 1)) == [prompt for prompt in range(10) if prompt != 9]


def test_a_prompt_that_has_changed_is_refused(tmp_path: Path) -> None:
    record(tmp_path, range(1))
    changed = [Prompt(0, "question 0", (99,))]
    writer = PartWriter(tmp_path, 0, changed, {}, Source("x", "a", "b", None), None)
    with pytest.raises(UserError, match="prompt 0 is another than the one that was answered: the data has changed"):
        writer.write(recorded_share(tmp_path, 0, 1).values())


def test_rows_of_episodes_name_the_tools_of_their_prompt(tmp_path: Path) -> None:
    record(tmp_path, range(1))

    def tools_of(row: Row) -> list[dict[str, Any]]:
        return [{"level": row.columns["level"]}]

    prompts = [replace(PROMPTS[0], columns={"level": 3})]
    writer = PartWriter(tmp_path, 0, prompts, {}, Source("x", "a", "b", None), tools_of)
    writer.write(recorded_share(tmp_path, 0, 1).values())
    join(tmp_path, 1, True, "{}")
    rows = parquet.read_table(tmp_path / SAMPLES).to_pylist()
    assert [json.loads(row["tools"]) for row in rows] == [[{"level": 3}]] * ANSWERS
