"""The report of a run whose files somebody else has edited, copied or cut: a page, or one sentence."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.cli.main import main
from grpo_mp.monitor.report.build import build_report
from grpo_mp.monitor.report.contents import Answer
from grpo_mp.monitor.report.page import render
from grpo_mp.monitor.report.records import read_run, read_runs
from grpo_mp.monitor.watch.server import LivePage, page_maker
from grpo_mp.utils.errors import UserError
from tests.cli.command import run_command
from tests.report.test_report import DETAILS, PLAN, make_run, metrics, sample, write_lines


def answers_of(run: Path) -> Sequence[Answer]:
    report = build_report(read_runs([run]))
    assert render(report)
    return report.sections[-1].answers


@pytest.mark.parametrize(
    "odd",
    [
        {"reward": "x", "tokens": None, "is_correct": ["yes"]},
        {"reward": 1e308, "tokens": -1, "is_correct": {}},
        {"reward": float("nan"), "tokens": "many", "is_correct": 1},
        {"token_details": {**DETAILS, "engine": ["x"] * 5}},
        {"token_details": {**DETAILS, "policy": [None, {}]}},
        {"token_details": {**DETAILS, "advantages": 3}},
        {"token_details": {**DETAILS, "pieces": "abc"}},
        {"token_details": [1]},
        {"token_details": {**DETAILS, "engine": [1e5] * 5}},
    ],
    ids=str,
)
def test_values_of_a_sample_that_are_none_are_left_out(tmp_path: Path, odd: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", 1)
    odd_line = {**sample(1, 0, 0), "response": "the odd one", **odd}
    file = run / "samples" / "step_000001.jsonl"
    with_nan = json.dumps(odd_line).replace("NaN", "null")
    file.write_text(with_nan + "\n" + json.dumps(sample(1, 0, 1)) + "\n")
    shown = {one.why: one for one in answers_of(run) if one.step == 1}
    assert shown["best"].response != "the odd one" or "token_details" in odd
    write_lines(file, [json.loads(with_nan)])
    assert [one.response for one in answers_of(run) if one.why == "longest"][-1] == "the odd one"


@pytest.mark.parametrize(
    ("plan", "place"),
    [
        ([], "the file"),
        ({**PLAN, "phases": []}, "phases"),
        ({**PLAN, "phases": {"train": None}}, "phases.train"),
        ({**PLAN, "phases": {"train": {"seconds": "x"}}}, "phases.train.seconds"),
        ({**PLAN, "phases": {"train": {"seconds": -1}}}, "phases.train.seconds"),
        ({**PLAN, "nodes": "two"}, "nodes"),
    ],
    ids=str,
)
def test_what_is_no_plan_is_a_sentence(tmp_path: Path, plan: Any, place: str) -> None:
    run = make_run(tmp_path / "run", 1)
    (run / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(
        UserError, match=rf"plan\.json: no plan of a run \({re.escape(place)}: Input [a-z0-9 ]+\): remove it$"
    ):
        read_run(run, "run")


@pytest.mark.parametrize("plan", [{}, {"phases": {}}, {"phases": {"train": {}}}, {"step_s": 2.0}], ids=str)
def test_a_plan_that_does_not_say_all_is_shown_as_far_as_it_does(tmp_path: Path, plan: Any) -> None:
    run = make_run(tmp_path / "run", 1)
    (run / "plan.json").write_text(json.dumps(plan))
    tables = {table.title: table for section in build_report(read_runs([run])).sections for table in section.tables}
    assert ("Beside the plan" in tables) == bool(plan)
    if plan.get("phases"):
        assert tables["Beside the plan"].rows[0] == ("train", "", "1")
        assert tables["Memory beside the plan"].rows == (("train", "", "3.00", "", "2.50"),)


def test_a_page_on_screen_says_what_is_wrong_with_the_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    live = LivePage(run, page_maker(run, None))
    asyncio.run(live.refresh())
    assert not live.problem
    (run / "plan.json").write_text('{"phases": []}')
    asyncio.run(live.refresh())
    assert "plan.json: no plan of a run" in live.problem


@pytest.mark.parametrize("error", [AttributeError("'list' object"), OverflowError("too large")])
def test_a_page_that_cannot_be_made_does_not_end_the_server(tmp_path: Path, error: Exception) -> None:
    def make() -> str:
        raise error

    live = LivePage(tmp_path, make)
    asyncio.run(live.refresh())
    assert type(error).__name__ in live.problem


def test_a_preset_that_does_not_exist_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 1)
    (run / "settings.yaml").write_text("run: {steps: 1}\nalgorithm: {preset: foo}\n")
    result = run_command(capsys, "report", run)
    assert (result.status, result.out) == (2, "")
    assert result.err.endswith(
        "error: algorithm.preset: there is no preset 'foo': correct it in the run's settings.yaml\n"
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_values_that_are_too_large_to_draw_are_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    far = [
        metrics(step) | {"reward/mean": sign * 1e308, "time/step_s": 1e308} for step, sign in enumerate((1, -1, 1), 1)
    ]
    write_lines(run / "metrics.jsonl", [*far, {**metrics(4), "reward/mean": 10**400}, metrics(5)])  # type: ignore[list-item]
    assert main(["report", str(run)]) == 0
    assert "4 values not finite" in (run / "report.html").read_text()
    near = [metrics(step) | {"reward/mean": (-1) ** step * 1e300, "time/train_s": 1e300} for step in range(1, 5)]
    write_lines(run / "metrics.jsonl", near)  # type: ignore[arg-type]
    assert main(["report", str(run)]) == 0
    (run / "metrics.jsonl").write_text('{"step": 1e308}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: no metrics of a step"):
        read_run(run, "run")


def test_copies_that_a_user_made_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    before = read_run(run, "run")
    for name in ("samples/step_000001_copy.jsonl", "samples/eval_1.jsonl.jsonl", "eval/step_3 (1).json"):
        (run / name).write_text('{"a": 1}\n')
    assert read_run(run, "run") == before
