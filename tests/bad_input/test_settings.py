"""Settings files and overrides that no run can follow."""

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from grpo_mp.config import Settings, check_settings, load_settings
from grpo_mp.utils.section import nested_sections
from tests.bad_input.doors import NO_TEXT, NOT_FILES, Content, answers, as_nobody, noise, put, refused, tree
from tests.minimal_settings import MINIMAL_SETTINGS

GOOD = yaml.safe_dump(MINIMAL_SETTINGS).encode()
FILES: dict[str, Content] = {
    **NOT_FILES,
    **NO_TEXT,
    "empty": b"",
    "only a comment": b"# run: {}\n",
    "a list": b"- run\n",
    "text": b"run",
    "a number": b"3",
    "no settings": b"{}",
    "two documents": GOOD + b"---\n" + GOOD,
    "a setting twice": GOOD.replace(b"  lr:", b"  lr: 40000\n  lr:"),
    "a section twice": GOOD + b"\noptimizer: {lr: 1.0}\n",
    "an alias of itself": GOOD + b"\nlayout: &a [*a]\n",
    "an alias of nothing": GOOD + b"\nlayout: *gone\n",
    "a tag that runs code": GOOD + b"\nlayout: !!python/object/apply:os.getpid []\n",
    "a tag of a number": GOOD + b"\nschedule: !!int many\n",
    "a tag of a date": GOOD + b"\nschedule: !!timestamp many\n",
    "a tag of bytes": GOOD + b"\nschedule: !!binary ////\n",
    "lists 5,000 deep": GOOD + b"\nlayout: " + b"[" * 5000 + b"]" * 5000,
    "sections 5,000 deep": GOOD + b"\nlayout: " + b"{a: " * 5000 + b"}" * 5000,
    "indentation 300 deep": b"".join(b" " * i + b"a:\n" for i in range(300)),
    "sections 5,000 deep and never closed": b"{a: " * 5000,
    "a number of 5,000 digits": GOOD.replace(b"steps: 3", b"steps: " + b"9" * 5000),
    "a line of a mebibyte": b"run: " + b"x" * 2**20,
    "a name of 5,000 characters": b"x" * 5000 + b": 1\n" + GOOD,
    "a million lines": b"#\n" * 10**6,
    "a list as name": GOOD + b"\n? [a, b]\n: 1\n",
    "a number as name": GOOD + b"\n3: 1\n",
    "null as name": GOOD + b"\nnull: 1\n",
    "a tab": GOOD + b"\nlayout:\n\ttensor: 2\n",
    "an open quote": GOOD + b'\nschedule: "colocated\n',
    "an open bracket": GOOD + b"\nlayout: {tensor: 1\n",
    "a colon": b":",
    "a foreign version": b"%YAML 9.9\n---\n" + GOOD,
    "JSON cut": b'{"run": {"folder": "x", ',
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = put(tmp_path / "settings.yaml", FILES[name])
    before = tree(tmp_path)
    with as_nobody(name):
        sentence = refused(lambda: load_settings(file))
    assert sentence.startswith(str(file))
    assert tree(tmp_path) == before


def test_a_byte_order_mark_and_windows_line_ends_are_nothing(tmp_path: Path) -> None:
    file = put(tmp_path / "settings.yaml", b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"))
    assert load_settings(file) == check_settings(MINIMAL_SETTINGS, "here")


# -- every setting by its type -------------------------------------------------------------------------------

NOT_NUMBERS: tuple[Any, ...] = (
    float("nan"),
    float("inf"),
    -float("inf"),
    "nan",
    "1e400",
    10**400,
    -(10**30),
    "many",
    "",
    True,
    False,
    [1],
    [],
    {"a": 1},
    "1:30",
    "0x",
    "1,5",
    "--1",
    "\ud800",
    "1\0",
)
NOT_TEXT: tuple[Any, ...] = (3, 1.5, True, ["x"], {"a": "x"}, "\ud800", "a\0b")
NOT_PATHS: tuple[Any, ...] = (*NOT_TEXT, "", " ", "x" * 300, "a/" * 3000, "a\nb", None)
NOT_BOOLEANS: tuple[Any, ...] = (2, -1, "maybe", "", None, [], {}, 0.5)
TAKES_MORE: dict[str, tuple[Any, ...]] = {  # than a text: what they refuse
    "environment_factory": (3, 1.5, True, ["x"], {"a": 3}, "\ud800", "a\0b"),
    "tool_environment": (3, 1.5, True, "x", [3], ["\ud800"], {"a": "x"}),
}
NEEDED: dict[str, Any] = {  # sections that are off by default
    "reward.model": {"url": "http://x"},
    "reward.steps": {"url": "http://x"},
    "reward.judge": {"url": "http://x", "model": "x"},
    "reward.code": {"weight": 1.0},
    "reward.correct": {"term": "answer"},
    "algorithm.distillation": {"teacher": {"url": "http://x"}},
    "data.train.NAME": {"path": "x"},
    "data.eval.NAME": {"path": "x"},
}


def fields_of(kind: Any) -> Iterator[str]:
    """Every setting of a type, by its dotted name."""
    for path, section in nested_sections(Settings):
        for name, field in section.model_fields.items():
            plain = {item for item in (field.annotation, *get_args(field.annotation)) if isinstance(item, type)}
            if kind in plain and not plain - {kind, type(None)} and name not in TAKES_MORE:
                yield f"{path}.{name}".removeprefix(".")


def with_value(name: str, value: Any) -> dict[str, Any]:
    """The fewest settings with one of them changed."""
    settings: dict[str, Any] = yaml.safe_load(GOOD)
    settings["data"]["train"] = {"NAME": {"path": "x"}}
    *path, last = name.split(".")
    section, here = settings, ""
    for part in path:
        here = f"{here}.{part}".removeprefix(".")
        section = section.setdefault(part, deepcopy(NEEDED.get(here, {})))
    section[last] = value
    return settings


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *((name, NOT_NUMBERS) for kind in (int, float) for name in fields_of(kind)),
        *((name, NOT_PATHS[:-1]) for name in fields_of(Path)),
        *((name, NOT_TEXT) for name in fields_of(str)),
        *((name, NOT_BOOLEANS) for name in fields_of(bool)),
        *((f"rollout.{name}", bad) for name, bad in TAKES_MORE.items()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_setting(name: str, bad: tuple[Any, ...]) -> None:
    for value in bad:
        assert name in refused(lambda value=value: check_settings(with_value(name, value), "here")), repr(value)[:50]


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.betas=[1.5, -3]",
        "optimizer.betas=[0.9]",
        "optimizer.betas=[0.9, 1.0]",
        "optimizer.betas=0.9",
        "optimizer.betas=[.nan, 0.9]",
        "optimizer.eps=0",
        "optimizer.eps=-1e-8",
        "optimizer.lr=0",
        "optimizer.lr=-1e-6",
        "optimizer.weight_decay=-0.1",
        "rollout.temperature=0",
        "rollout.temperature=-1",
        "rollout.top_p=1.1",
        "algorithm.kl.coef=-0.1",
        "run.steps=0",
        "run.steps=-3",
        "run.steps=1.5",
        "run.seed=-1",
        "run.seed=1e30",
        "run.seed=4294967296",
        "rollout.group_size=0",
        "sync.check_tolerance=.nan",
        "sync.check_tolerance=0",
        "sync.timeout_s=1e12",
        "monitor.phase_timeout_s=1e300",
        "sync.bucket_bytes=infGiB",
        "sync.bucket_bytes=nanGiB",
        "sync.bucket_bytes=-1GiB",
        "sync.bucket_bytes=1e400GiB",
        "sync.bucket_bytes=\u00b2",
        "sync.bucket_bytes=1 GB",
        "sync.bucket_bytes=999999999999GiB",
        "reward.answer=.nan",
        "reward.range=[1, 1]",
        "reward.range=[.nan, 1]",
        "reward.functions={f.py:f: .inf}",
        "reward.functions={f.py:f: yes}",
        "reward.functions=[f.py:f]",
        "reward.on_error=.nan",
        "reward.judge={url: ftp://x, model: x}",
        "reward.judge={url: http://x, model: x, scores: [1, 0]}",
        "reward.judge={url: http://x, model: x, pattern: '('}",
        "rollout.failed=.nan",
        "rollout.failed=maybe",
        "rollout.stop=['']",
        "rollout.stop=[3]",
        "rollout.stop=END",
        "run.folder=",
        "run.folder=''",
        "run.folder=[a]",
        "run.folder=3",
        "model.path=''",
        "model.family=''",
        "model.family=no_such",
        "model.dtype=int8",
        "monitor.loggers=[1]",
        "monitor.loggers={jsonl: 3}",
        "monitor.loggers=no_such",
        "data.eval={a: {}}",
        *(f"data.eval={{'{name}': x.jsonl}}" for name in ("", "..", "../x", "/x", "a/b", ".a", "a b", "a" * 101)),
        "data.train={a/b: x.jsonl}",
        "monitor.guards={reward/mean: {min: 2, max: 1}}",
        "rollout.temperature=1e-300",
        "data.train={}",
        "data.train=[a, b]",
        "data.eval.a.samples=1000000000",
        "layout.tensor=0",
        "layout.tensor=1.5",
        "layout=3",
        "algorithm=3",
        "algorithm={preset: [a]}",
        "algorithm=no_such",
        "rollout.group_size.x=1",
        "run=null",
        "run.=3",
        ".folder=x",
        "..=x",
        "=",
        "",
        "run",
        "run.folder",
        "run.folder:x",
        "run..folder=x",
        "optimizer.lr=[",
        "optimizer.lr={",
        "optimizer.lr=*a",
        "optimizer.lr=!!python/none",
        "optimizer.lr=1e-5\nrun: 3",
        "optimizer.lr=\0",
        "optimizer.lr=\udcff",
        "engine.args=3",
        "engine.args=[a]",
        "training.megatron_args={a: 1, a: 2}",
        "training.megatron_args={x: .nan}",
        "x." * 500 + "y=1",
        "x" * 100_000 + ".y=1",
        "optimizer.lr=" + "[" * 5000,
        "rollout.group_size=" + "9" * 10_000,
        "schedule=",
        "schedule=[async]",
    ],
    ids=lambda override: ascii(override[:40]),
)
def test_overrides(override: str, tmp_path: Path) -> None:
    file = put(tmp_path / "settings.yaml", GOOD)
    refused(lambda: load_settings(file, [override]))


def test_noise_in_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    for content in noise(GOOD, count=300, seed=0):
        result = answers(lambda content=content: load_settings(put(file, content)))
        assert result is None or isinstance(result, Settings)
    assert os.listdir(tmp_path) == [file.name]
