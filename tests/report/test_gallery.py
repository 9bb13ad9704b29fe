"""The gallery of sicknesses says what the recorded runs say, and has the picture of each."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench import gallery
from tests.bench.sicknesses import HEALTHY, SICKNESSES

PAGE = gallery.PAGE.read_text(encoding="utf-8")
NAMES = re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)


def test_the_page_is_that_of_the_recorded_runs() -> None:
    assert gallery.page(gallery.recorded_names()) == PAGE, "run python -m tests.bench.gallery"


def test_every_sickness_of_the_bench_is_on_the_page() -> None:
    assert gallery.recorded_names() == [*SICKNESSES] == NAMES


def test_every_picture_is_there_and_has_both_runs() -> None:
    pictures = re.findall(r"\]\((gallery/\w+\.svg)\)", PAGE)
    assert len(pictures) == len(NAMES)
    files = [gallery.PAGE.parent / name for name in pictures]
    assert sum(file.stat().st_size for file in files) < 35_000 * len(files)
    for file in files:
        text = "".join(ElementTree.parse(file).getroot().itertext())
        assert HEALTHY in text
        assert file.stem in text


def test_a_sickness_that_is_not_found_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = [json.loads(line) for line in (gallery.RECORDED / f"{HEALTHY}.jsonl").read_text().splitlines()]
    monkeypatch.setattr(gallery, "run", lambda name, out: healthy)
    monkeypatch.setattr(gallery, "RECORDED", tmp_path)
    assert not gallery.make("truncation", tmp_path)
    assert not [*tmp_path.iterdir()]
