"""What a pipeline runs, from settings that are written out here; and what it refuses before anything starts."""

import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.algorithms.evaluation import Estimate, EvalScore
from grpo_mp.config import load_pipeline
from grpo_mp.pipeline import runner
from grpo_mp.pipeline.runner import RECORDS, Pipeline, read_records
from grpo_mp.pipeline.scores import plot_scores, score_table
from grpo_mp.pipeline.stages import Record, StageJob, digests, make_jobs
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_json
from tests.minimal_settings import MINIMAL_SETTINGS

ROOT = Path(__file__).parents[2]
RL, SFT = (
    {**MINIMAL_SETTINGS, "layout": {}},
    {
        "run": {"folder": "r", "steps": 1},
        "model": {"path": "m"},
        "data": {"train": "t.jsonl"},
        "sft": {"batch_size": 1, "max_tokens": 8},
        "optimizer": {"lr": 1e-5},
    },
)
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
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(RL))
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SFT))
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
    assert [by_name[name].needs for name in ("evaluate base", "start", "rl", "student", "evaluate rl")] == [
        *((), (), ("start",), ("found",), ("rl",))
    ]
    assert by_name["evaluate student"].settings["layout"] == {}
    assert "layout" not in by_name["evaluate rl"].settings
    open_pipeline(write(folder, STAGES, base="m", evaluation=evaluation))  # all settings are right


@pytest.mark.parametrize(
    ("stage", "values", "sentence"),
    [
        (
            *("rl", {"settings": {"model.path": "{strat}/final"}}),
            r"stages.rl: model.path takes {strat}/final, and no stage before it is strat \(did you mean start\?\)",
        ),
        ("start", {"settings": {"model.path": "{rl}/final"}}, "and no stage before it is rl.*: it is the first"),
        (
            *("rl", {"settings": {"model.path": "{start}_x/final"}}),
            r"stages.rl: model.path takes {start}_x/final, in which {start} stands for no folder: .* {start}/final",
        ),
        ("rl", {"settings": {"model.path": "x/{start}/final"}}, "in which {start} stands for no folder"),
        (
            *("rl", {"settings": {"model.path": "{start}/finl"}}),
            r"stages.rl: model.path takes {start}/finl, which stage start \(sft\) does not make \(did you mean "
            r"{start}/final\?\): it makes final, final_adapter, exports/step_000010, .*, checkpoints/step_000010$",
        ),
        ("rl", {"settings": {"model.path": "{start}"}}, r"takes {start}, which .* \(did you mean {start}/final\?\)"),
        ("rl", {"settings": {"model.path": "{start}/final/../x"}}, "which stage start .* does not make"),
        ("rl", {"settings": {"model.path": "{start}/exports/step_1"}}, r"did you mean {start}/exports/step_000010\?"),
        ("rl", {"settings": {"data.train": "{start}/samples.parquet"}}, r"stage start \(sft\) does not make"),
        (
            *("student", {"settings": {"model.path": "{found}/final"}}),
            r"which stage found \(sample\) does not make .*: it makes samples.parquet, pass_rates.jsonl, groups$",
        ),
        ("rl", {"settings": {"model.path": "{ start }/final"}}, r"of stage start has blanks: write {start}/final$"),
        ("rl", {"settings": {"model.path": "{ strat }/final"}}, r"is strat \(did you mean start\?\)"),
        ("rl", {"settings": {"model.path": "x/{ start }/final"}}, "in which {start} stands for no folder"),
        (
            *("rl", {"settings": {"model.path": "{start}/final_adapter"}}),
            "^stage rl: .*start/final_adapter: stage start makes no adapters: set its model.lora, or",
        ),
        (
            *("rl", {"settings": {"model.path": "{start}/exports/step_000010"}}),
            "^stage rl: .*stage start makes no exports while it goes on: set its run.export_every, or take final",
        ),
        ("rl", {"settings": {"run.folder": "x"}}, "run.folder is the stage's"),
        ("rl", {"settings": {"optimiser.lr": 1}}, "stage rl: .*unknown setting optimiser"),
        ("rl", {"config": "sft.yaml", "settings": {}}, "stage rl: .*these are settings of supervised fine-tuning"),
        ("rl", {"config": "absent.yaml"}, "absent.yaml"),
        ("rl", {"settings": {"run.export": False}}, "stage rl: run.export=false leaves no model"),
        ("rl", {"command": "trian"}, "stages.rl.command"),
        ("rl", {"setings": {}}, r"unknown setting .*setings .*did you mean"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_starts(folder: Path, stage: str, values: Any, sentence: str) -> None:
    stages = {name: {**one, **values} if name == stage else one for name, one in STAGES.items()}
    with pytest.raises(UserError, match=sentence):
        open_pipeline(write(folder, stages))
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("step", "steps"), [(3, 20), (0, 20), (20, 10)])
def test_exports_that_a_stage_does_not_reach_are_refused(folder: Path, step: int, steps: int) -> None:
    start = {**STAGES["start"], "settings": {"run.export_every": 2, "run.steps": steps}}
    stages = {**STAGES, "start": start, "rl": deepcopy(STAGES["rl"])}
    stages["rl"]["settings"]["model.path"] = "{start}/exports/step_000004"
    jobs = open_pipeline(write(folder, stages)).jobs
    assert jobs[1].settings["model.path"] == f"{folder}/out/start/exports/step_000004"
    stages["rl"]["settings"]["model.path"] = f"{{start}}/exports/step_{step:06d}"
    with pytest.raises(UserError, match=rf"makes exports of every 2 steps up to {steps}, not of step {step}: take one"):
        open_pipeline(write(folder, stages))


def test_what_else_later_stages_may_take(folder: Path) -> None:
    """Adapters where there are some, files below a model, pass rates; a text of JSON names no stage."""
    start = {**STAGES["start"], "settings": {"model.lora": {"rank": 2, "alpha": 2.0}}}
    settings = {
        "data": {"train": {"a": {"path": "t.jsonl", "pass_rates": "{found}/pass_rates.jsonl"}}},
        "engine.args": {"lora": "{start}/final_adapter", "template": "{start}/final/chat_template.jinja"},
        "engine.args.text": '{"a": 1}',
    }
    stages = {**STAGES, "start": start, "student": {"command": "train", "config": "rl.yaml", "settings": settings}}
    out, found = folder / "out", open_pipeline(write(folder, stages)).jobs[-1].settings
    assert found["data"]["train"]["a"]["pass_rates"] == f"{out}/found/pass_rates.jsonl"
    assert found["engine.args"] == {
        "lora": f"{out}/start/final_adapter",
        "template": f"{out}/start/final/chat_template.jinja",
    }
    assert found["engine.args.text"] == '{"a": 1}'


@pytest.mark.parametrize("name", ["Start", "../x", "base", ""])
def test_names_of_stages_are_those_of_folders(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="stage"):
        load_pipeline(write(folder, {name: STAGES["start"]}))


def test_a_digest_is_of_all_that_decides_what_a_stage_makes(folder: Path) -> None:
    jobs = jobs_of(write(folder, STAGES))
    texts = {job.config: "a" for job in jobs}
    before = digests(jobs, texts)
    other = [replace(job, settings={**job.settings, "run.seed": 1}) if job.name == "rl" else job for job in jobs]
    changed = digests(other, texts)
    assert [name for name in before if before[name] != changed[name]] == ["rl", "found", "student"]
    changed = digests(jobs, texts | {folder / "rl.yaml": "b"})
    assert [name for name in before if before[name] != changed[name]] == ["rl", "found", "student"]
    assert len(set(before.values())) == len(jobs)


@pytest.mark.parametrize("done", [True, False])
def test_a_stage_that_was_begun_with_other_settings_is_refused(folder: Path, done: bool) -> None:
    file = write(folder, STAGES)
    pipeline = open_pipeline(file)
    assert {pipeline.state(job) for job in pipeline.jobs} == {"to do"}
    known = {job.name: job for job in pipeline.jobs}
    digest = pipeline._digests
    records = {name: Record(digest[name], dict(known[name].settings), done) for name in ("start", "rl")}
    (folder / "out").mkdir()
    (folder / "out" / RECORDS).write_text(json.dumps({name: asdict(record) for name, record in records.items()}))
    (folder / "out/start/final").mkdir(parents=True)
    (folder / "out/start/final/config.json").touch()
    (folder / "out/rl").mkdir()
    again = open_pipeline(file)
    states = [again.state(job) for job in again.jobs]
    assert states == ["done" if done else "begun", "begun", "to do", "to do"]  # of rl the result is not there
    stages = {**STAGES, "start": {**STAGES["start"], "settings": {"optimizer.lr": 2e-3}}}
    state = "done" if done else "begun"
    with pytest.raises(UserError, match=rf"stage start was {state} with optimizer.lr=0.001: take these, or another"):
        open_pipeline(write(folder, stages))
    (folder / "sft.yaml").write_text(yaml.safe_dump({**SFT, "optimizer": {"lr": 1e-4}}))
    with pytest.raises(UserError, match=rf"stage start was {state} with another .*sft.yaml"):
        open_pipeline(write(folder, STAGES))


def record_all(file: Path) -> None:
    """Let all stages be done."""
    pipeline = open_pipeline(file)
    digest, out = pipeline._digests, file.parent / "out"
    for job in pipeline.jobs:
        job.result.parent.mkdir(parents=True)
        job.result.touch()
    records = {job.name: asdict(Record(digest[job.name], dict(job.settings), True)) for job in pipeline.jobs}
    (out / RECORDS).write_text(json.dumps(records))
    assert {open_pipeline(file).state(job) for job in pipeline.jobs} == {"done"}


def test_a_stage_that_is_removed_is_done_anew_and_what_follows_from_it_too(folder: Path) -> None:
    """As the refusal of other settings advises."""
    file, out = write(folder, STAGES), folder / "out"
    record_all(file)
    shutil.rmtree(out / "rl")
    with pytest.raises(
        UserError, match=rf"^{out}/rl was removed, and {out}/found, {out}/student follows .*: remove them"
    ):
        open_pipeline(file)
    for name in ("found", "student"):
        shutil.rmtree(out / name)
    again = open_pipeline(file)
    assert [again.state(job) for job in again.jobs] == ["done", "to do", "to do", "to do"]
    shutil.rmtree(out / "start")
    other = write(folder, {**STAGES, "start": {**STAGES["start"], "settings": {"optimizer.lr": 2e-3}}})
    assert {open_pipeline(other).state(job) for job in again.jobs} == {"to do"}


def write_inputs(folder: Path) -> None:
    """Write what the stages read: chats, prompts, code of a reward and of a source, models."""
    for name in (
        "chats.jsonl",
        "prompts.jsonl",
        "held_out.jsonl",
        "my.py",
        "source.py",
        "m/config.json",
        "b/config.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("1")
    train = {
        "data.train": str(folder / "prompts.jsonl"),
        "data.eval": {"held": str(folder / "held_out.jsonl")},
        "data.source": f"{folder / 'source.py'}:read",
        "reward.functions": {f"{folder / 'my.py'}:brief": 1.0},
    }
    stages = deepcopy(STAGES)
    stages["start"]["settings"] |= {"data.train": str(folder / "chats.jsonl"), "model.path": str(folder / "m")}
    for name in ("rl", "found"):
        stages[name]["settings"] |= train
    evaluation = {"config": "rl.yaml", "settings": {"model.path": str(folder / "m")}}
    write(folder, stages, base=str(folder / "b"), evaluation=evaluation)


@pytest.fixture
def finished(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a pipeline whose stages are done, each with its name as result."""
    write_inputs(folder)
    file = folder / "pipeline.yaml"

    def run(arguments: Sequence[str]) -> tuple[int, bool]:
        job = next(job for job in jobs_of(file) if job.arguments(None) == list(arguments))
        job.result.parent.mkdir(parents=True, exist_ok=True)
        job.result.write_text(job.name)
        return 0, False

    monkeypatch.setattr(runner, "_run", run)
    assert open_pipeline(file).run(None) == 0
    monkeypatch.setattr(runner, "_run", lambda _: pytest.fail("all is done"))
    assert open_pipeline(file).run(None) == 0
    monkeypatch.setattr(runner, "_run", run)
    return file


@pytest.mark.parametrize(
    ("changed", "job"),
    [
        *(("chats.jsonl", "start"), ("m/config.json", "start"), ("b/config.json", "evaluate base")),
        *(("prompts.jsonl", "rl"), ("my.py", "rl"), ("source.py", "rl")),
        *(("held_out.jsonl", "rl"), ("out/found/samples.parquet", "student")),
        *(("out/rl/final/config.json", "evaluate rl"), ("out/start/final/config.json", "evaluate start")),
    ],
)
def test_a_stage_that_was_done_with_other_files_is_refused(finished: Path, changed: str, job: str) -> None:
    file = finished.parent / changed
    file.write_text("2")
    named = file.parent if file.name == "config.json" else file
    with pytest.raises(UserError, match=rf"^stage {job} was done with another {named}: put that back, or"):
        open_pipeline(finished)
    if named == file:
        file.unlink()  # to save room
        open_pipeline(finished)


def test_a_stage_that_was_begun_with_other_files_is_refused(finished: Path) -> None:
    out = finished.parent / "out"
    (out / "rl" / "final" / "config.json").unlink()  # as after a kill
    records = read_records(out / RECORDS)
    records["rl"] = replace(records["rl"], done=False)
    write_json(out / RECORDS, {name: asdict(record) for name, record in records.items()})
    code = finished.parent / "my.py"
    code.write_text("2")
    for _ in range(2):
        with pytest.raises(UserError, match=rf"^stage rl was begun with another {code}: put that back, or"):
            open_pipeline(finished)
    code.write_text("1")
    assert open_pipeline(finished).run(None) == 0
    assert read_records(out / RECORDS)["rl"].inputs == records["rl"].inputs


def test_one_answer_to_a_prompt_is_sampled_and_not_trained_on(folder: Path) -> None:
    write_inputs(folder)
    file = folder / "pipeline.yaml"
    jobs = {job.name: job for job in jobs_of(file)}
    single = {"rollout.group_size": 1}
    found = runner.load_job_settings(replace(jobs["found"], settings={**jobs["found"].settings, **single}))
    assert found.rollout.group_size == 1
    with pytest.raises(UserError, match="nothing to compare with: set 2 or more"):
        runner.load_job_settings(replace(jobs["rl"], settings={**jobs["rl"].settings, **single}))


def test_a_stage_whose_result_is_gone_is_done_anew_of_the_same_and_for_the_same(finished: Path) -> None:
    out = finished.parent / "out"
    result = out / "start/final/config.json"
    result.unlink()
    chats = finished.parent / "chats.jsonl"
    chats.write_text("2")
    with pytest.raises(UserError, match=rf"^stage start was done with another {chats}"):
        open_pipeline(finished)
    chats.write_text("1")
    assert open_pipeline(finished).run(None) == 0
    result.unlink()
    pipeline = open_pipeline(finished)

    def other(arguments: Sequence[str]) -> tuple[int, bool]:
        result.write_text("another")
        return 0, False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_run", other)
        with pytest.raises(UserError, match=r"^stage evaluate start was done with another .*start/final"):
            pipeline.run(None)


def test_evaluations_take_what_stages_made(folder: Path) -> None:
    evaluation = {"config": "rl.yaml", "settings": {"tokenizer.path": "{start}/final"}}
    stages = {**STAGES, "start": {**STAGES["start"], "evaluation": None}}
    by_name = {job.name: job for job in jobs_of(write(folder, stages, evaluation=evaluation))}
    assert by_name["evaluate rl"].settings["tokenizer.path"] == f"{folder}/out/start/final"
    assert by_name["evaluate rl"].needs == ("rl", "start")
    with pytest.raises(UserError, match=r"evaluation of base: tokenizer.path takes {start}/final, and no stage before"):
        jobs_of(write(folder, stages, base="m", evaluation=evaluation))


def test_a_stop_is_no_success_and_two_do_not_run_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, runs = open_pipeline(write(folder, STAGES)), list[str]()

    def run(arguments: Sequence[str]) -> tuple[int, bool]:
        runs.append(arguments[0])
        with pytest.raises(UserError, match=r"out: another grpo-mp pipeline runs there: wait for it, or stop it"):
            open_pipeline(folder / "pipeline.yaml").run(None)
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
    figure = plot_scores(scores)
    assert figure
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    assert [[bar.get_height() for bar in axes.patches] for axes in figure.axes] == [[50.0], [50.0]]  # type: ignore[attr-defined]
    assert plot_scores({"base": {"a": replace(score, accuracy=None)}}) is None


def test_the_recipe_is_in_order() -> None:
    file = ROOT / "configs/tiny_r1_pipeline.yaml"
    settings = load_pipeline(file, ["folder=elsewhere"])
    pipeline = Pipeline(settings, make_jobs(settings, file))
    stages = [job.name for job in pipeline.jobs if job.name in settings.stages]
    assert stages == ["cold_start", "reasoning", "rejection_sampling", "fine_tuning", "all_scenarios", "distillation"]
    assert {job.folder.parts[0] for job in pipeline.jobs} == {"elsewhere"}
