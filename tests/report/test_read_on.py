"""The report of a run that goes on, and of a long one: what is read, drawn and written is what it must be, no more."""

import json
from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from grpo_mp.monitor.appended import COMPARED_BYTES
from grpo_mp.monitor.report.build import build_report
from grpo_mp.monitor.report.charts import draw
from grpo_mp.monitor.report.contents import Picture
from grpo_mp.monitor.report.page import render
from grpo_mp.monitor.report.records import RunFolder, read_run
from grpo_mp.monitor.rules import Finding, MetricLine, RuleWatch
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watch.server import page_maker
from tests.report.test_report import make_run


def test_a_run_that_goes_on_is_read_on_and_only_what_changed_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", 12)
    make, drawn, looked = page_maker(run, None), list[str](), list[int]()
    step = RuleWatch.step

    def count(picture: Picture, salt: str) -> str:
        drawn.append(picture.title)
        return draw(picture, salt)

    def look(watch: RuleWatch, line: MetricLine) -> list[Finding]:
        looked.append(int(line["step"] or 0))
        return step(watch, line)

    monkeypatch.setattr("grpo_mp.monitor.report.page.draw", count)
    monkeypatch.setattr(RuleWatch, "step", look)
    folder, first = RunFolder(run, "run"), make()
    assert folder.read().metrics
    assert len(drawn) > 30
    drawn.clear()
    assert make() == first
    assert drawn == []
    text = (run / "metrics.jsonl").read_bytes()
    with (run / "metrics.jsonl").open("r+b") as lines:  # what was read is not read again
        lines.write(b" " * (len(text) - COMPARED_BYTES))
    line = json.dumps({"step": 13, "train/entropy": 0.125}).encode() + b"\n"
    with (run / "metrics.jsonl").open("ab") as lines:
        lines.write(line)
    timeline = Timeline(run, 1)
    with timeline.span("EVAL"):
        pass
    followed, page = folder.read(), make()
    assert looked == [*range(1, 14)]
    assert drawn[0] == "Entropy"
    assert len(drawn) < 10  # and where a stacked phase is now 0
    (run / "metrics.jsonl").write_bytes(text + line)
    assert followed == read_run(run, "run")
    assert page == render(build_report([read_run(run, "run")]))


def test_the_page_of_long_answers_to_long_questions_is_small(tmp_path: Path) -> None:
    """Of the signs that HTML writes in five, and each answer with all tokens that a run keeps of one."""
    run = make_run(tmp_path / "run", 1000, text="&<" * 3000)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    shown = page.count('class="tokens"')
    assert shown == 18  # four of four steps, and a question before and after
    assert page.count("characters ...]") == 2 * shown
    assert len(page.encode()) < 5e6


def test_a_report_writes_the_timeline_so_far_where_it_is_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    assert main(["report", str(run)]) == 0
    assert not (run / "trace.json").exists()
    timeline = Timeline(run, 1)
    with timeline.span("EVAL"):
        assert main(["report", str(run), "--trace"]) == 0
    names = [
        (event["pid"], event["name"]) for event in json.loads((run / "trace.json").read_text()) if event["ph"] == "B"
    ]
    assert names == [*((rank, name) for rank in (0, 1) for name in ("GENERATE", "TRAIN", "SYNC")), (1, "EVAL")]
    assert not list(run.glob("*.incomplete"))
