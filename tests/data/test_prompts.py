"""Prompts of a train set from every kind of source; bad rows; the digest, which any change of what rows say changes."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import parquet

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.prompts import PromptReader, PromptSet, final_answer
from grpo_mp.rewards.answer_reading import Number, read_answer
from grpo_mp.utils.errors import UserError
from tests.data.prompt_sets import TOKENIZER, load, write

ROWS = [
    {"question": "How many apples? 3+4", "answer": "3+4=<<3+4=7>>7\n#### 7", "level": 1},
    {"question": "Earn", "answer": "A lot.\n#### 1,234,000", "level": 2},
    {"question": "Where?", "answer": "at home", "level": 3},
]


def sources(folder: Path) -> list[str]:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(folder / "single")
    datasets.DatasetDict({"train": saved.select([0]), "test": saved}).save_to_disk(folder / "splits")
    (folder / "plain").mkdir()
    write(folder / "plain" / "test.jsonl", ROWS)
    names = (str(folder / "single"), f"{folder / 'splits'}:test", f"{folder / 'plain'}:test")
    return [write(folder / "rows.jsonl", ROWS), str(folder / "rows.parquet"), *names]


def test_every_source_gives_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for source in sources(tmp_path):
        prompts = load(source)
        assert [prompt.answer for prompt in prompts] == ["7", "1234000", "at home"], source
        assert [prompt.text for prompt in prompts] == [row["question"] for row in ROWS]
        assert [prompt.columns for prompt in prompts] == ROWS
        assert [prompt.index for prompt in prompts] == [0, 1, 2]
        assert TOKENIZER.decode(prompts[1].tokens) == "<|user|>Earn<|im_end|><|assistant|>"


def test_messages_and_system_message(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "3+4"}]
    own = [{"role": "system", "content": "mine"}, *chat]
    source = write(tmp_path / "a.jsonl", [{"prompt": chat}, {"prompt": own}, {"prompt": "3+4"}])
    prompts = load(source, prompt_column="prompt", answer_column=None, system_prompt="yours")
    texts = [TOKENIZER.decode(prompt.tokens) for prompt in prompts]
    assert texts[0] == texts[2] == "<|system|>yours<|im_end|><|user|>3+4<|im_end|><|assistant|>"
    assert texts[1] == texts[0].replace("yours", "mine")
    assert [prompt.text for prompt in prompts] == ["3+4", "system: mine\n\nuser: 3+4", "3+4"]
    assert prompts[0].answer is None


def test_tokens_are_those_of_the_tokenizer_s_own_chat_call(tmp_path: Path) -> None:
    prompts = load(write(tmp_path / "a.jsonl", ROWS))
    for prompt, row in zip(prompts, ROWS, strict=True):
        chat = [{"role": "user", "content": row["question"]}]
        assert list(prompt.tokens) == TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def test_long_prompts_are_counted_and_left_out_never_cut(tmp_path: Path) -> None:
    rows = [{"question": "1" * length, "answer": "#### 1"} for length in (5, 9, 6, 7)]
    source = write(tmp_path / "a.jsonl", rows)
    prompts = load(source, limit=6 + 3)
    assert (len(prompts), prompts.too_long) == (2, 2)
    assert [prompt.text for prompt in prompts] == ["11111", "111111"]
    assert [prompts[i].index for i in range(2)] == [0, 1]
    with pytest.raises(UserError, match=r"all 4 prompts are longer than rollout.max_prompt_tokens=7"):
        load(source, limit=7)


def test_count_keeps_the_first_rows_whether_they_fit_or_not(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"question": "1" * length, "answer": "1"} for length in (5, 9, 6, 7, 9)])
    reader = PromptReader(DataConfig(train=source), TOKENIZER, 6 + 3)
    found = []
    for count in (1, 2, 3, 5, 9):
        prompts = reader.read_part(source, count)
        found.append((len(prompts), prompts.too_long))
    assert found == [(1, 0), (1, 1), (2, 1), (2, 3), (2, 3)]
    with pytest.raises(UserError, match="all 1 prompts are longer"):
        replace(reader, max_tokens=7).read_part(source, 1)


def test_a_prompt_is_known_by_all_of_its_messages(tmp_path: Path) -> None:
    """Chats that end alike are different prompts, also by what a call of a tool says."""

    def chats(passages: Sequence[str], **last: Any) -> PromptSet:
        end = {"role": "user", "content": "How many?"} | last
        rows = [{"question": [{"role": "user", "content": text}, end], "answer": "1"} for text in passages]
        return load(write(tmp_path / "chats.jsonl", rows))

    first = [*chats(("2 apples", "3 apples"))]
    assert [prompt.text for prompt in first] == [f"user: {count} apples\n\nuser: How many?" for count in (2, 3)]
    call = {"function": {"name": "count", "arguments": {"of": "apples"}}}
    asked = {"role": "user", "content": "go"}
    answered = {"role": "tool", "content": "3"}
    with_calls = [
        [asked, {"role": "assistant", "tool_calls": [one]}, answered]
        for one in (call, {"function": {"name": "count", "arguments": {"of": "pears"}}})
    ]
    rows = [{"question": chat, "answer": "1"} for chat in with_calls]
    assert len({prompt.text for prompt in load(write(tmp_path / "calls.jsonl", rows))}) == 2


GOOD = {"question": "a", "answer": "1"}
BAD_ROWS = [
    ([GOOD, "{'a': 1}"], r"a\.jsonl, line 2: not valid JSON"),
    ([{"question": "  ", "answer": "1"}], r"line 1: column question: the prompt is empty"),
    ([{"question": [{"role": "you", "content": "a"}], "answer": "1"}], r"line 1: .* a message needs role"),
    ([{"question": "a", "answer": None}], r"line 1: column answer: expected an answer"),
    (
        [GOOD, {"qestion": "a", "answer": "1"}],
        r"line 2: no column question \(did you mean qestion\?\).* qestion, answer",
    ),
    (
        [{"question": "a", "solution": "1"}],
        r"line 1: no column answer.* set data.answer_column to one of them or to null",
    ),
    ([], r"a\.jsonl: no rows"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS)
def test_bad_rows_are_named_with_file_and_line(rows: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize("name", ["none.jsonl", "./no/such/folder:train"])
def test_missing_source_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no such file|Couldn't find any data file"):
        load(name)


@pytest.mark.parametrize(
    ("answer", "digits"),
    [
        (10**400, "1" + "0" * 400),
        (1e-05, "0.00001"),
    ],
    ids=lambda value: str(value)[:10],
)
def test_an_answer_may_be_any_number_and_is_read_as_that(answer: float, digits: str, tmp_path: Path) -> None:
    (prompt,) = load(write(tmp_path / "a.jsonl", [GOOD | {"answer": answer}]))
    assert prompt.answer == digits
    reading = read_answer(digits)
    assert isinstance(reading, Number)
    assert reading.value == Fraction(str(answer))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### -1,234.50 ", "-1234.50"),
        ("a #### 3\nb\n#### 4\n", "4"),
        (" plain 1,234 ", "plain 1,234"),
        ("#### 3 in the middle\nand on", "#### 3 in the middle\nand on"),
        (r"Choose \boxed{\text{(B)}}, since $x>0$.", r"\text{(B)}"),
        (r"First $a=\boxed{5}$. Then $b=\fbox{2^{100}}$.", "2^{100}"),
        (r"\boxed{2} \text{ or } \boxed{3}", r"\boxed{2} \text{ or } \boxed{3}"),
        ("so\n#### \\boxed{7}", "7"),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


STREAMS = """
import datasets

def generated(name):
    yield from datasets.load_dataset("parquet", data_files=name, split="train", streaming=True)

def streamed(name):
    return datasets.load_dataset("parquet", data_files=name, split="train", streaming=True)

def broken(name):
    yield {"question": "How", "answer": "1"}
    raise RuntimeError("the server is gone")

def differing(name):
    yield {"question": "How", "answer": "1", "tests": [1, "a", None]}
    yield {"question": "many", "answer": 2, "own": {3, 4}}
"""


def test_streams_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come back as they were given."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "streams.py").write_text(STREAMS)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")

    def read(name: str, function: str) -> PromptSet:
        return load(name, source=f"{tmp_path / 'streams.py'}:{function}")

    for name in ("generated", "streamed"):
        prompts = read(str(tmp_path / "rows.parquet"), name)
        assert [prompt.columns for prompt in prompts] == ROWS, name
    prompts = read("any", "differing")
    assert [prompts[1].columns["own"], prompts[0].columns["tests"]] == [{3, 4}, [1, "a", None]]
    with pytest.raises(UserError, match=r"reading 'any' failed: RuntimeError: the server is gone"):
        read("any", "broken")


SUMS = [{"question": f"{i}+1?", "answer": str(i + 1), "level": i} for i in range(6)]


def digest(folder: Path, *sets: list[dict[str, Any]], **settings: Any) -> str:
    train = {f"set{number}": write(folder / f"{number}.jsonl", rows) for number, rows in enumerate(sets)}
    return load(train, **settings).digest


CHANGES = {
    "answer": [*SUMS[:5], SUMS[5] | {"answer": "7"}],
    "column_of_a_reward": [*SUMS[:5], SUMS[5] | {"level": 9}],
    "row_more": [*SUMS, SUMS[0]],
    "order": SUMS[::-1],
}


@pytest.mark.parametrize("rows", CHANGES.values(), ids=CHANGES)
def test_a_changed_row_changes_it(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert digest(tmp_path, rows) != digest(tmp_path, SUMS)
    assert digest(tmp_path, SUMS, rows) != digest(tmp_path, SUMS, SUMS)


def test_what_is_made_of_rows_changes_it(tmp_path: Path) -> None:
    assert digest(tmp_path, SUMS, system_prompt="Count.") != digest(tmp_path, SUMS)
    long = [*SUMS, {"question": "7 " * 40, "answer": "7", "level": 0}]
    assert digest(tmp_path, long, limit=30) != digest(tmp_path, long)
    assert digest(tmp_path, SUMS, SUMS[:3]) != digest(tmp_path, SUMS[:3], SUMS)


def test_the_same_rows_have_the_same_wherever_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert digest(tmp_path / "other", SUMS) == digest(tmp_path, SUMS)
    pq.write_table(pa.Table.from_pylist(SUMS), tmp_path / "rows.parquet")
    assert load({"set0": str(tmp_path / "rows.parquet")}).digest == digest(tmp_path, SUMS)
