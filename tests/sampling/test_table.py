"""Rows of answers: what is written is what the answers are, and what `datasets` and pyarrow read."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from grpo_mp.config.sft_settings import ChatDataConfig
from grpo_mp.data.chat_data import read_chat
from grpo_mp.data.rows import read_rows
from grpo_mp.rollout.client import sampling_seed
from grpo_mp.rollout.dump import FACTS, check_digest
from grpo_mp.trainer.sampling import table
from grpo_mp.trainer.sampling.table import Source, join_parts, open_part, row_of, schema_of
from grpo_mp.utils.types import Prompt, Sample
from tests.sampling.groups import PROMPT, answer

SOURCE = Source("models/x", "abc", "def", 17)
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
    is_scored=False,
    messages=TURNS,
    metrics={"turns": 2.0, "odd": math.nan},
    step_rewards=((3, 0.25),),
    episode_reward=0.5,
)


ADD = {"type": "object", "properties": {"b": {"type": "array"}, "a": {"type": "integer"}}, "required": ["a"]}
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": ADD}},)


def write(folder: Path, samples: Sequence[Sample], episodes: bool, prompt: Prompt = PROMPT) -> Path:
    schema = schema_of(episodes)
    with open_part(folder / "part.parquet", schema) as part:
        part.write([row_of(prompt, sample, SOURCE, TOOLS if episodes else ()) for sample in samples])
    join_parts([folder / "part.parquet"], folder / "all.parquet", schema, '{"seed": 0}')
    return folder / "all.parquet"


def test_a_row_is_the_answer(tmp_path: Path) -> None:
    file = write(tmp_path, [PLAIN], episodes=False)
    check_digest(file)
    assert json.loads(parquet.read_schema(file).metadata[FACTS]) == {"seed": 0}
    (row,) = parquet.read_table(file).to_pylist()
    assert row["messages"] == [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "\\boxed{7}"},
    ]
    names = ("prompt_index", "group_id", "index", "prompt", "response", "answer", "reward", "is_correct", "truncated")
    assert [row[name] for name in names] == [3, 3, 2, "How many?", "\\boxed{7}", "7", 1.5, True, False]
    assert (row["prompt_tokens"], row["tokens"]) == ([5, 6], [8, 9, 10])
    assert (row["logprobs"], row["mask"]) == ([-0.5, -1.5, -2.5], [True] * 3)
    assert json.loads(row["reward_terms"]) == {"answer": 1.0, "boxed": 1.0}
    assert (json.loads(row["columns"]), json.loads(row["extra"])) == ({"level": 2}, {"first": "é"})
    assert row["seed"] == sampling_seed(17, 3, 0, 2)
    assert [row[name] for name in ("model", "model_digest", "settings_digest")] == ["models/x", "abc", "def"]


def test_an_episode_keeps_its_turns_and_what_was_given(tmp_path: Path) -> None:
    (row,) = parquet.read_table(write(tmp_path, [EPISODE], episodes=True)).to_pylist()
    assert row["mask"] == [True, False, False, True]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [json.loads(row["messages"][1]["tool_calls"]), row["messages"][2]["tool_call_id"]] == [[CALL], "1"]
    assert row["messages"][2]["content"] == "3 ?"  # half a character is none
    assert (row["state"], row["episode_reward"], row["is_scored"]) == ("completed", 0.5, False)
    assert (json.loads(row["metrics"]), row["step_rewards"]) == (
        {"turns": 2.0, "odd": None},
        [{"token": 3, "reward": 0.25}],
    )


def test_datasets_reads_chats_with_arguments_as_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (row,) = read_rows(str(write(tmp_path, [EPISODE], episodes=True)))
    chat = [
        {name: value for name, value in message.items() if value is not None} for message in row.columns["messages"]
    ]
    assert chat == [*PROMPT.messages, TURNS[0], {**TURNS[1], "content": "3 ?"}, TURNS[2]]
    assert row.columns["columns"] == {"level": 2}
    for each in (row, replace(row, columns=parquet.read_table(tmp_path / "all.parquet").to_pylist()[0])):
        assert json.dumps(read_chat(each, ChatDataConfig(train="unused")).tools) == json.dumps(TOOLS)


def test_an_episode_without_tools_learns_from_none(tmp_path: Path) -> None:
    (row,) = read_rows(str(write(tmp_path, [PLAIN], episodes=False)))
    assert "tools" not in row.columns
    assert row_of(PROMPT, EPISODE, SOURCE)["tools"] is None


@pytest.mark.parametrize(("row_group_bytes", "largest"), [(1, 2), (6_000, 20), (2**26, 41)])
def test_row_groups_are_bounded_and_rows_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group_bytes: int, largest: int
) -> None:
    monkeypatch.setattr(table, "ROW_GROUP_BYTES", row_group_bytes)
    schema, parts = schema_of(False), [tmp_path / f"{name}.parquet" for name in "abc"]
    written: list[tuple[int, int]] = []
    for number, file in enumerate(parts):
        with open_part(file, schema) as part:
            for prompt in range(40 * number, 40 * (number != 1) + 40 * number):  # the second has no rows
                samples = [answer(index, 20, Prompt(prompt, "?", (1,))) for index in range(prompt % 3)]
                part.write([row_of(Prompt(prompt, "?", (1,)), sample, SOURCE) for sample in samples])
                written += [(prompt, sample.index) for sample in samples]
    join_parts(parts, tmp_path / "all.parquet", schema, "{}")
    rows: list[dict[str, Any]] = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert [(row["prompt_index"], row["index"]) for row in rows] == written
    with parquet.ParquetFile(tmp_path / "all.parquet") as content:
        sizes = [content.metadata.row_group(i).num_rows for i in range(content.num_row_groups)]
    assert largest / 4 < max(sizes) <= largest


def test_without_seeds_a_row_has_none(tmp_path: Path) -> None:
    assert row_of(PROMPT, PLAIN, Source("x", "a", "b", None))["seed"] is None
