"""Data files, columns and chat templates that give no prompts."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from grpo_mp.config.data_sections import DataConfig, TrainSetConfig
from grpo_mp.data.prompts import PromptSet, load_prompts, load_train_prompts, read_pass_rates
from tests.bad_input.doors import NOT_FILES, Content, answers, as_nobody, noise, put, refused, tree
from tools.tiny.models import make_tokenizer

TOKENIZER = make_tokenizer(["How", "many", "apples"])
ROW = {"question": "How many?", "answer": "3"}
GOOD = b"".join(json.dumps(ROW | {"answer": str(i)}).encode() + b"\n" for i in range(8))


def load(source: Path | str, **columns: Any) -> PromptSet:
    return load_prompts(str(source), DataConfig(train="x", **columns), TOKENIZER, 60)


def row(**changes: Any) -> bytes:
    return json.dumps(ROW | changes).encode() + b"\n"


FILES: dict[str, Content] = {
    **NOT_FILES,
    "empty": b"",
    "an empty line": GOOD + b"\n",
    "binary": bytes(range(256)),
    "zeros": bytes(1000),
    "UTF-16": GOOD.decode().encode("utf-16"),
    "half a character": GOOD + b'{"question": "\xc3", "answer": "3"}\n',
    "Latin-1": '{"question": "ä", "answer": "3"}'.encode("latin-1"),
    "no JSON": GOOD + b"question: How many?\n",
    "single quotes": b"{'question': 'x', 'answer': '3'}\n",
    "a list": b"[1, 2]\n",
    "a text": b'"question"\n',
    "null": b"null\n",
    "JSON over lines": json.dumps(ROW, indent=1).encode(),
    "a list of lists": json.dumps([[ROW]]).encode(),
    "a list of rows that is cut": json.dumps([ROW], indent=1).encode()[:-3],
    "cut": GOOD[:-10],
    "two objects in a line": row().strip() + row(),
    "deep": b'{"question": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "deep and cut": b'{"a": ' * 100_000 + b"\n",
    "a number of 5,000 digits": b'{"question": "x", "answer": ' + b"9" * 5000 + b"}\n",
    "an answer of infinite size": b'{"question": "x", "answer": 1e999}\n',
    "an answer that is NaN": b'{"question": "x", "answer": NaN}\n',
    "an answer that is Infinity": b'{"question": "x", "answer": -Infinity}\n',
    "another column that is NaN": b'{"question": "x", "answer": "3", "level": NaN}\n',
    "an answer that is true": row(answer=True),
    "an answer that is null": row(answer=None),
    "an answer that is a list": row(answer=["3"]),
    "an answer that is a section": row(answer={"a": 3}),
    "an answer that is empty": row(answer=""),
    "an answer of blanks": row(answer=" \n "),
    "an answer of half a character": row(answer="\ud83d"),
    "a prompt that is empty": row(question=""),
    "a prompt of blanks": row(question=" \t\n"),
    "a prompt that is null": row(question=None),
    "a prompt that is a number": row(question=3),
    "a prompt that is true": row(question=True),
    "a prompt that is a section": row(question={"role": "user"}),
    "a prompt of half a character": row(question="a \ud83d"),
    "a chat that is empty": row(question=[]),
    "a chat of text": row(question=["How many?"]),
    "a chat of lists": row(question=[["user", "x"]]),
    "a message of no role": row(question=[{"content": "x"}]),
    "a message of another role": row(question=[{"role": "root", "content": "x"}]),
    "a message of a list as role": row(question=[{"role": ["user"], "content": "x"}]),
    "a message of no content": row(question=[{"role": "user"}]),
    "a message of null": row(question=[{"role": "user", "content": None}]),
    "a last message that is the policy's": row(question=[{"role": "assistant", "content": "x"}]),
    "a message of half a character": row(question=[{"role": "user", "content": "\udc00"}]),
    "no column of the prompt": b'{"answer": "3"}\n',
    "no column of the answer": b'{"question": "x"}\n',
    "a thousand other columns": json.dumps({f"column {i}": 1 for i in range(1000)}).encode() + b"\n",
    "only prompts that are too long": row(question="x" * 100),
    "a bad row at the end": GOOD * 300 + row(answer=None),
}


@pytest.mark.parametrize("name", FILES)
def test_json_lines(name: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = put(tmp_path / "rows.jsonl", FILES[name])
    before = tree(tmp_path)
    with as_nobody(name):
        assert str(file) in refused(lambda: load(file))
    assert tree(tmp_path) == before


def test_noise_in_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for content in noise(GOOD, count=200, seed=1):
        prompts = answers(lambda content=content: load(put(file, content)))
        assert prompts is None or all(prompt.answer and prompt.text.strip() for prompt in prompts)


PARQUET = {
    "empty": b"",
    "text": GOOD,
    "binary": bytes(range(256)) * 9,
    "only the mark": b"PAR1PAR1",
    "marks around zeros": b"PAR1" + bytes(100) + b"PAR1",
    "a footer of four gibibytes": b"PAR1" + b"\xff\xff\xff\xff" + b"PAR1",
}


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def table(tmp_path: Path, *rows: dict[str, Any]) -> bytes:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), tmp_path / "made")
    return (tmp_path / "made").read_bytes()


@pytest.mark.parametrize("name", [*PARQUET, *NOT_FILES])
@pytest.mark.usefixtures("own_cache")
def test_parquet(name: str, tmp_path: Path) -> None:
    file = put(tmp_path / "rows.parquet", (PARQUET | NOT_FILES)[name])
    tmp_path.chmod(0o755)
    if name == "unreadable":
        with as_nobody(name):
            refused(lambda: load(file))
    else:
        refused(lambda: load(file))


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"question": None, "answer": "3"}],
        [{"question": b"\xff", "answer": "3"}],
        [{"question": "x", "answer": float("nan")}],
        [{"question": "x"}],
        [{"question": "x", "answer": b"3"}],
        [{"question": "x", "answer": False}],
    ],
    ids=str,
)
@pytest.mark.usefixtures("own_cache")
def test_rows_of_parquet(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    content = table(tmp_path, *rows)
    refused(lambda: load(put(tmp_path / "rows.parquet", content)))


@pytest.mark.usefixtures("own_cache")
def test_cut_and_changed_parquet(tmp_path: Path) -> None:
    content = table(tmp_path, *([ROW] * 20))
    for i, changed in enumerate(noise(content, count=12, seed=2)):
        prompts = answers(lambda i=i, changed=changed: load(put(tmp_path / f"rows_{i}.parquet", changed)))
        assert prompts is None or all(prompt.answer for prompt in prompts)


NAMES = (
    "",
    " ",
    "rows.txt",
    "a/" * 3000,
    "x" * 300,
    "x" * 300 + ".jsonl",
    "a\0b.jsonl",
    "/dev/zero",
    "/dev/null",
    ":",
    "a:b:c:d",
    "/proc/self/mem",
    "/",
    ".",
    "rows.csv:train",
    "\udcff.jsonl",
    "/nowhere/rows.jsonl",
    "/etc/passwd/rows.jsonl",
)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:30]))
@pytest.mark.usefixtures("own_cache")
def test_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: load(name))
    assert not tree(tmp_path)


TEMPLATES = {
    "no text": "{{ messages | tojson | length }",
    "not closed": "{% for message in messages %}",
    "a name that is not there": "{{ nothing.at.all }}",
    "a function that is not there": "{{ nothing() }}",
    "a division by zero": "{{ 1 / 0 }}",
    "a sum of text and number": "{{ 'a' + 1 }}",
    "a refusal": "{{ raise_exception('only images') }}",
    "one that calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "a way out of the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a file": "{% include '/etc/passwd' %}",
    "one that leaves the prompt out": "Answer now.",
    "nothing": " ",
    "more numbers than memory": "{{ range(999999999) | list }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", TEMPLATES[name])
    file = put(tmp_path / "rows.jsonl", GOOD)
    refused(lambda: load(file))


PASS_RATES = {
    "no JSON": b"x",
    "text": b'{"prompt": "x", "pass_rate": "1"}',
    "NaN": b'{"prompt": "x", "pass_rate": NaN}',
    "above 1": b'{"prompt": "x", "pass_rate": 1.1}',
    "below 0": b'{"prompt": "x", "pass_rate": -0.1}',
    "nothing": b'{"prompt": "x"}',
    "no prompt": b'{"pass_rate": 1}',
    "a list as prompt": b'{"prompt": [], "pass_rate": 1}',
    "of other prompts": b'{"prompt": "other", "pass_rate": 1}',
    "nothing left": b'{"prompt": "How many?", "pass_rate": 0.0}',
}


@pytest.mark.parametrize("name", PASS_RATES)
def test_pass_rates(name: str, tmp_path: Path) -> None:
    file, train = put(tmp_path / "rates.jsonl", PASS_RATES[name]), put(tmp_path / "rows.jsonl", GOOD)
    train_set = TrainSetConfig(path=str(train), pass_rates=str(file), min_pass_rate=0.5)
    refused(lambda: load_train_prompts(DataConfig(train={"a": train_set}), TOKENIZER, 60))


def test_pass_rates_that_are_no_file(tmp_path: Path) -> None:
    for name, content in NOT_FILES.items():
        if name != "unreadable":
            refused(lambda content=content: read_pass_rates(str(put(tmp_path / "rates.jsonl", content))))
            (tmp_path / "rates.jsonl").rmdir() if name == "folder" else None
