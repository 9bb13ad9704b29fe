"""Files of recorded answers: rows that `datasets` and pyarrow read, counts, pass rates that training reads."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from grpo_mp.config.sft_settings import ChatDataConfig
from grpo_mp.data.chat_data import read_chat
from grpo_mp.data.prompts import read_pass_rates
from grpo_mp.data.rows import read_rows
from grpo_mp.monitor.evaluation import pass_at_k
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.dump import FACTS
from grpo_mp.rollout.journal import GroupJournal
from grpo_mp.trainer.sampling import answers
from grpo_mp.trainer.sampling.answers import GROUPS, PASS_RATES, SAMPLES, AnswerWriter, read_recorded
from grpo_mp.trainer.sampling.filters import load_sample_filters
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Prompt, Sample
from tests.sampling.groups import PROMPT, answer, group_of

ANSWERS = 4
PROMPTS = [Prompt(number, f"question {number}", (number,), str(number)) for number in range(10)]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
TURNS = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3 \ud83d", "tool_call_id": "1"},
    {"role": "assistant", "content": "\\boxed{3}"},
)
PLAIN = answer(
    *(2, 3),
    text="\\boxed{7}",
    reward=1.5,
    reward_terms={"answer": 1.0, "boxed": 1.0},
    is_correct=True,
    extra={"first": "é"},
)
EPISODE = answer(
    *(0, 4),
    text="\\boxed{3}",
    generated=(True, False, False, True),
    state="completed",
    messages=TURNS,
    metrics={"turns": 2.0, "odd": math.nan},
)
ADD = {"type": "object", "properties": {"b": {"type": "array"}, "a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]


def write_one(folder: Path, sample: Sample, episodes: bool) -> Path:
    """Record and write the only answer to a prompt."""
    prompts = [replace(PROMPT, index=0)]
    journal = GroupJournal(folder / GROUPS, 0)
    assert journal.append(0, 0, group_of(sample, prompt=prompts[0]), RewardStats(), kept=True)
    writer = AnswerWriter(folder, prompts, {}, TOOLS if episodes else None)
    writer.write(read_recorded(folder, 1), {"seed": 0})
    return folder / SAMPLES


def test_a_row_is_the_answer(tmp_path: Path) -> None:
    file = write_one(tmp_path, PLAIN, episodes=False)
    assert json.loads(parquet.read_schema(file).metadata[FACTS]) == {"seed": 0}
    (row,) = parquet.read_table(file).to_pylist()
    assert row["messages"] == [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "\\boxed{7}"},
    ]
    names = ("prompt_index", "index", "prompt", "response", "answer", "reward", "is_correct", "truncated")
    assert [row[name] for name in names] == [0, 2, "How many?", "\\boxed{7}", "7", 1.5, True, False]
    assert (row["prompt_tokens"], row["tokens"]) == ([5, 6], [8, 9, 10])
    assert (row["logprobs"], row["mask"]) == ([-0.5, -1.5, -2.5], [True] * 3)
    assert json.loads(row["reward_terms"]) == {"answer": 1.0, "boxed": 1.0}
    assert (json.loads(row["columns"]), json.loads(row["extra"])) == ({"level": 2}, {"first": "é"})
    (read,) = read_rows(str(file))
    assert "tools" not in read.columns


def test_datasets_reads_an_episode_with_arguments_as_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (row,) = read_rows(str(write_one(tmp_path, EPISODE, episodes=True)))
    chat = [
        {name: value for name, value in message.items() if value is not None} for message in row.columns["messages"]
    ]
    assert chat == [*PROMPT.messages, TURNS[0], {**TURNS[1], "content": "3 ?"}, TURNS[2]]  # half a character is none
    assert row.columns["columns"] == {"level": 2}
    (plain,) = parquet.read_table(tmp_path / SAMPLES).to_pylist()
    assert (plain["state"], plain["mask"]) == ("completed", [True, False, False, True])
    assert json.loads(plain["metrics"]) == {"turns": 2.0, "odd": None}
    for each in (row, replace(row, columns=plain)):
        assert json.dumps(read_chat(each, ChatDataConfig(train="unused")).tools) == json.dumps(TOOLS)


def right(prompt: int, index: int) -> bool | None:
    """Nothing is said of the last prompt; of the others the number says how many are right."""
    return None if prompt == 9 else index < prompt % 5


def record(folder: Path) -> None:
    """By three ranks, in another order than that of the prompts."""
    for prompt in sorted(range(10), key=lambda number: number * 7 % 10):
        samples = [
            answer(index, 1 + index, PROMPTS[prompt], is_correct=right(prompt, index), reward=float(index))
            for index in range(ANSWERS)
        ]
        stats = RewardStats(failures=Counter(judge=1))
        journal = GroupJournal(folder / GROUPS, prompt % 3)
        assert journal.append(prompt // 4, prompt, group_of(*samples, prompt=PROMPTS[prompt]), stats, kept=True)


def finish(folder: Path) -> dict[str, Any]:
    filters = load_sample_filters({"right": {}, "best": {"k": 1}}, ANSWERS, True)
    return AnswerWriter(folder, PROMPTS, filters).write(read_recorded(folder, 10), {})


@pytest.mark.parametrize("row_group_bytes", [1, 2**26])
def test_rows_rates_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group_bytes: int) -> None:
    monkeypatch.setattr(answers, "ROW_GROUP_BYTES", row_group_bytes)
    record(tmp_path)
    summary = finish(tmp_path)
    rows = parquet.read_table(tmp_path / SAMPLES).to_pylist()
    best = [(prompt, prompt % 5 - 1) for prompt in range(9) if prompt % 5]  # the last right one has the highest reward
    assert [(row["prompt_index"], row["index"]) for row in rows] == best
    rights = [prompt % 5 for prompt in range(9)]
    assert summary["accuracy"] == pytest.approx(sum(rights) / 36)
    assert summary["pass_at"] == {
        k: pytest.approx(sum(pass_at_k(ANSWERS, right, k) for right in rights) / 9) for k in (1, 2, 4)
    }
    assert summary["dropped"] == {"right": 40 - sum(rights), "best": sum(rights) - 7}
    named = ("answered_prompts", "samples", "kept", "kept_prompts", "reward", "length", "truncated_ratio")
    assert [summary[name] for name in named] == [10, 40, 7, 7, 1.5, 2.5, 0.0]
    assert summary["rewards"]["failures"] == {"judge": 10}
    rates = read_pass_rates(str(tmp_path / PASS_RATES))
    assert rates == {f"question {prompt}": prompt % 5 / ANSWERS for prompt in range(9)}


def test_a_prompt_that_has_changed_is_refused(tmp_path: Path) -> None:
    record(tmp_path)
    changed = [Prompt(number, "another", (99,)) for number in range(10)]
    with pytest.raises(UserError, match="prompt 0 is another than the one that was answered: the data has changed"):
        AnswerWriter(tmp_path, changed, {}).write(read_recorded(tmp_path, 10), {})
    assert not (tmp_path / SAMPLES).exists()
