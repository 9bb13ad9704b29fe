"""The gallery of sicknesses says what the recorded runs say, and has the picture of each."""

import json
import re
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest

from grpo_mp.monitor.rules import RULES
from grpo_mp.monitor.run_folder import RunRecords
from tests.bench import gallery
from tests.bench.sicknesses import HEALTHY, SICKNESSES

PAGE = gallery.PAGE.read_text(encoding="utf-8")
NAMES = re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)


def test_the_page_has_no_control_characters() -> None:
    """A model's answer may have them, and a terminal obeys them."""
    assert not [letter for letter in PAGE if not letter.isprintable() and letter != "\n"]
    assert gallery.printable("a\x1b[2Jé\n") == "a\ufffd[2Jé\n"


def test_the_page_is_that_of_the_recorded_runs() -> None:
    assert gallery.page(gallery.recorded_names()) == PAGE, "run python -m tests.bench.gallery"


def test_every_sickness_of_the_bench_is_on_the_page() -> None:
    assert gallery.recorded_names() == [*SICKNESSES] == NAMES


def test_what_fires_is_in_the_table_of_rules() -> None:
    rows = re.findall(r"^\| \[.+?\]\(.+?\) \| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(rows) == len(NAMES) - 1
    assert {*rows} <= {(rule.name, str(rule.weight)) for rule in RULES}


def test_every_picture_is_there_and_has_both_runs() -> None:
    pictures = re.findall(r"\]\((gallery/\w+\.svg)\)", PAGE)
    assert len(pictures) == len(NAMES)
    files = [gallery.PAGE.parent / name for name in pictures]
    assert sum(file.stat().st_size for file in files) < 35_000 * len(files)
    for file in files:
        text = "".join(ElementTree.parse(file).getroot().itertext())
        assert HEALTHY in text
        assert file.stem in text


def test_answers_are_the_best_of_the_first_and_the_last_step() -> None:
    lines = [{"prompt": "2+2", "expected": "4", "response": f"r{reward}", "reward": reward} for reward in (0.5, 1.5, 1)]
    samples = {step: tuple(line | {"prompt_index": 1, "tokens": 1} for line in lines[:step]) for step in (1, 2, 3)}
    found = gallery.best_answers(RunRecords("run", {}, (), {}, samples))
    assert [(one["step"], one["response"]) for one in found] == [(1, "r0.5"), (3, "r1.5")]


def test_the_healthy_run_has_learned() -> None:
    accuracy = [line["rollout/accuracy"] for line in gallery.read_recorded(HEALTHY).metrics[1:]]
    assert fmean(accuracy[-5:]) > fmean(accuracy[:5]) + 0.1


def test_a_sickness_that_is_not_found_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = [json.loads(line) for line in (gallery.RECORDED / f"{HEALTHY}.jsonl").read_text().splitlines()]
    monkeypatch.setattr(gallery, "run", lambda name, out: healthy)
    monkeypatch.setattr(gallery, "RECORDED", tmp_path)
    assert not gallery.make("truncation", tmp_path)
    assert not [*tmp_path.iterdir()]
