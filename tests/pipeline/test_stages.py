"""What a pipeline runs, from settings that are written out here; and what it refuses before anything starts."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.config import load_pipeline
from grpo_mp.monitor.evaluation import Estimate, EvalScore
from grpo_mp.pipeline import runner
from grpo_mp.pipeline.runner import Pipeline
from grpo_mp.pipeline.scores import score_table
from grpo_mp.pipeline.stages import StageJob, make_jobs
from grpo_mp.utils.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS

ROOT = Path(__file__).parents[2]
RL = {**MINIMAL_SETTINGS, "layout": {}}
SFT = {
    "run": {"folder": "r", "steps": 1},
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "sft": {"batch_size": 1, "max_tokens": 8},
    "optimizer": {"lr": 1e-5},
}
STAGES: dict[str, Any] = {
    "start": {"command": "sft", "config": "sft.yaml", "settings": {"optimizer.lr": 1e-3}},
    "rl": {"command": "train", "config": "rl.yaml", "settings": {"model.path": "{start}/final"}},
    "found": {"command": "sample", "config": "rl.yaml", "settings": {"model.path": "{rl}/final"}},
    "student": {
        "command": "sft",
        "config": "sft.yaml",
        "settings": {"data": {"train": "{found}/samples.parquet"}},
        "evaluation": {"layout": {}},
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = {"path": str(tmp_path / "m")}
    data = {"train": str(tmp_path / "t.jsonl")}
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    (tmp_path / "t.jsonl").write_text("{}")
    for name, settings in (("rl", RL), ("sft", SFT)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**settings, "model": model, "data": data}))
    return tmp_path


def write(folder: Path, stages: dict[str, Any], **more: Any) -> Path:
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump({"folder": str(folder / "out"), "stages": stages, **more}, sort_keys=False))
    return file


def jobs_of(file: Path) -> list[StageJob]:
    return make_jobs(load_pipeline(file), file)


def open_pipeline(file: Path) -> Pipeline:
    settings = load_pipeline(file)
    return Pipeline(settings, make_jobs(settings, file))


def test_a_stage_takes_what_former_ones_made(folder: Path) -> None:
    evaluation = {"config": "rl.yaml", "settings": {"rollout.temperature": 0.5}}
    jobs = jobs_of(write(folder, STAGES, base="m", evaluation=evaluation))
    out = folder / "out"
    assert [job.name for job in jobs] == [
        *("evaluate base", "start", "evaluate start", "rl", "evaluate rl", "found", "student", "evaluate student")
    ]
    by_name = {job.name: job for job in jobs}
    assert by_name["start"].arguments(2) == [
        *("sft", str(folder / "sft.yaml"), "--ranks", "2", "optimizer.lr=0.001", f'run.folder="{out}/start"')
    ]
    assert f'model.path="{out}/start/final"' in by_name["rl"].overrides
    assert by_name["found"].arguments(None) == [
        *("sample", str(folder / "rl.yaml"), "--out", f"{out}/found", f'model.path="{out}/rl/final"')
    ]
    assert json.loads(by_name["student"].overrides[0].removeprefix("data=")) == {
        "train": f"{out}/found/samples.parquet"
    }
    assert by_name["evaluate student"].options == (
        "--model",
        f"{out}/student/final",
        "--out",
        f"{out}/evaluate/student",
    )
    assert by_name["evaluate student"].settings["layout"] == {}
    assert "layout" not in by_name["evaluate rl"].settings
    open_pipeline(write(folder, STAGES, base=str(folder / "m"), evaluation=evaluation))  # all settings are right


@pytest.mark.parametrize(
    ("stage", "values", "sentence"),
    [
        (
            *("rl", {"settings": {"model.path": "{strat}/final"}}),
            r"stages.rl: model.path takes {strat}/final, and no stage before it is strat \(did you mean start\?\)",
        ),
        ("start", {"settings": {"model.path": "{rl}/final"}}, "and no stage before it is rl"),
        (
            *("rl", {"settings": {"model.path": "{start}/finl"}}),
            r"takes {start}/finl, which stage start \(sft\) does not make$",
        ),
        ("rl", {"settings": {"model.path": "{start}/final/../x"}}, "which stage start .* does not make"),
        ("rl", {"settings": {"data.train": "{start}/samples.parquet"}}, r"stage start \(sft\) does not make"),
        ("student", {"settings": {"model.path": "{found}/final"}}, r"found \(sample\) does not make"),
        ("rl", {"settings": {"model.path": "none"}}, "^stage rl: model.path=none: none/config.json does not exist"),
        ("rl", {"settings": {"run.folder": "x"}}, "run.folder is the stage's"),
        ("rl", {"settings": {"optimiser.lr": 1}}, "stage rl: .*unknown setting optimiser"),
        ("rl", {"config": "sft.yaml", "settings": {}}, "stage rl: .*these are settings of supervised fine-tuning"),
        ("rl", {"config": "absent.yaml"}, "absent.yaml"),
        ("rl", {"settings": {"run.export": False}}, "stage rl: run.export=false leaves no model"),
        ("rl", {"command": "trian"}, "stages.rl.command"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_starts(folder: Path, stage: str, values: Any, sentence: str) -> None:
    stages = {name: {**one, **values} if name == stage else one for name, one in STAGES.items()}
    with pytest.raises(UserError, match=sentence):
        open_pipeline(write(folder, stages))
    assert not (folder / "out").exists()


def test_what_else_later_stages_may_take(folder: Path) -> None:
    """Files below a model, pass rates; a text of JSON names no stage."""
    settings = {
        "data": {"train": {"a": {"path": str(folder / "t.jsonl"), "pass_rates": "{found}/pass_rates.jsonl"}}},
        "engine.args": {"template": "{start}/final/chat_template.jinja"},
        "engine.args.text": '{"a": 1}',
    }
    stages = {**STAGES, "student": {"command": "train", "config": "rl.yaml", "settings": settings}}
    out = folder / "out"
    found = open_pipeline(write(folder, stages)).jobs[-1].settings
    assert found["data"]["train"]["a"]["pass_rates"] == f"{out}/found/pass_rates.jsonl"
    assert found["engine.args"] == {"template": f"{out}/start/final/chat_template.jinja"}
    assert found["engine.args.text"] == '{"a": 1}'


@pytest.mark.parametrize("name", ["Start", "../x", "base", ""])
def test_names_of_stages_are_those_of_folders(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="stage"):
        load_pipeline(write(folder, {name: STAGES["start"]}))


def test_evaluations_take_what_stages_made(folder: Path) -> None:
    evaluation = {"config": "rl.yaml", "settings": {"tokenizer.path": "{start}/final"}}
    stages = {**STAGES, "start": {**STAGES["start"], "evaluation": None}}
    by_name = {job.name: job for job in jobs_of(write(folder, stages, evaluation=evaluation))}
    assert by_name["evaluate rl"].settings["tokenizer.path"] == f"{folder}/out/start/final"
    with pytest.raises(UserError, match=r"evaluation of base: tokenizer.path takes {start}/final, and no stage before"):
        jobs_of(write(folder, stages, base="m", evaluation=evaluation))


def test_a_pipeline_resumes_and_refuses_other_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(folder, STAGES)
    ran = list[str]()

    def run(arguments: Sequence[str]) -> tuple[int, bool]:
        job = next(job for job in jobs_of(file) if job.arguments(None) == list(arguments))
        ran.append(job.name)
        job.result.parent.mkdir(parents=True, exist_ok=True)
        job.result.touch()
        return (3, False) if job.name == "found" and ran.count("found") == 1 else (0, False)

    monkeypatch.setattr(runner, "_run", run)
    assert open_pipeline(file).run(None) == 3
    again = open_pipeline(file)
    assert [again.state(job) for job in again.jobs] == ["done", "done", "begun", "to do"]
    other = {**STAGES, "found": {**STAGES["found"], "settings": {"model.path": str(folder / "m")}}}
    with pytest.raises(UserError, match=rf"^stage found was begun with model.path='{folder}/out/rl/final': set that"):
        open_pipeline(write(folder, other))
    assert open_pipeline(write(folder, STAGES)).run(None) == 0
    assert ran == ["start", "rl", "found", "found", "student"]
    assert open_pipeline(file).run(None) == 0
    shutil.rmtree(folder / "out/rl")
    again = open_pipeline(file)
    assert [again.state(job) for job in again.jobs] == ["done", "to do", "begun", "begun"]


def test_a_stop_is_no_success(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = open_pipeline(write(folder, STAGES))
    runs = list[str]()

    def run(arguments: Sequence[str]) -> tuple[int, bool]:
        runs.append(arguments[0])
        return 0, True

    monkeypatch.setattr(runner, "_run", run)
    assert (pipeline.run(None), runs) == (runner.STOPPED, ["sft"])
    monkeypatch.setattr(runner, "_run", lambda _: (143, True))  # by the signal
    assert pipeline.run(None) == runner.STOPPED
    monkeypatch.setattr(runner, "_run", lambda _: (3, False))
    assert pipeline.run(None) == 3


def test_the_table_has_a_row_for_each_stage_and_set() -> None:
    score = EvalScore(
        0.5, 1.0, 9.25, accuracy_error=0.031, truncated_ratio=0.25, samples=4, pass_at={4: Estimate(0.75, 0.1)}
    )
    score = replace(score, reward_terms={"answer": 0.5, "boxed": 0.875})
    scores = {"base": {"a": replace(score, accuracy=None, pass_at={}, reward_terms={})}, "rl": {"a": score, "b": score}}
    lines = score_table(scores, {"rl": 61.4}).splitlines()
    assert lines[2:] == [
        "| base | a |  |  |  | 9.2 | 25.0 |  |",
        "| rl | a | 50.0 ± 3.1 | 75.0 (k = 4) | answer 0.50, boxed 0.88 | 9.2 | 25.0 | 61 |",
        "| rl | b | 50.0 ± 3.1 | 75.0 (k = 4) | answer 0.50, boxed 0.88 | 9.2 | 25.0 | 61 |",
    ]
