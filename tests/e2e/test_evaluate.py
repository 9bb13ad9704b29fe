"""A checkpoint of a run and the Hugging Face folder that the run left are the same policy to an evaluation."""

import json
import sys
from pathlib import Path

import pytest

from grpo_mp.scheduler.recovery import checkpoint_folder
from tests.e2e.conftest import LAST_STEP, FinishedRun, StartJob, outcome
from tests.e2e.jobs import read_jsonl

ALONE = (sys.executable, "-m", "grpo_mp.evaluate")
LAUNCHED = (sys.executable, "-m", "grpo_mp.launch", "--ranks", "2", "--evaluate")


@pytest.fixture(scope="module")
def results(finished_run: FinishedRun, start_job: StartJob) -> dict[str, Path]:
    """The checkpoint by two ranks in the layout that wrote it; the folder by one process."""
    run = finished_run.folder / "run"
    greedy = "data.eval.arithmetic.temperature=0"
    places = {"checkpoint": checkpoint_folder(run, LAST_STEP), "model": run / "final"}
    for name, place in places.items():
        command = LAUNCHED if name == "checkpoint" else ALONE
        job = start_job(greedy, f"--{name}", str(place), "--out", str(finished_run.folder / name), command=command)
        ended = outcome(job)
        assert (ended.status, ended.err, ended.left) == (0, "", [])
        assert "accuracy" in ended.out
    return {name: finished_run.folder / name for name in places}


def test_both_answer_alike(results: dict[str, Path]) -> None:
    checkpoint, model = (
        {row["prompt_index"]: row["response"] for row in read_jsonl(folder / "samples.jsonl")}
        for folder in results.values()
    )
    assert len(model) == 6
    assert checkpoint == model


def test_both_have_the_scores_of_these_answers(results: dict[str, Path]) -> None:
    for folder in results.values():
        rows = read_jsonl(folder / "samples.jsonl")
        (found,) = json.loads((folder / "eval.json").read_text())["sets"].values()
        assert found["accuracy"] == pytest.approx(sum(row["parts"]["answer"] for row in rows) / len(rows))
        assert found["length"] == pytest.approx(sum(row["tokens"] for row in rows) / len(rows))


def test_the_checkpoint_s_step_is_said_and_its_weights_are_those_of_its_last_update(results: dict[str, Path]) -> None:
    assert json.loads((results["checkpoint"] / "eval.json").read_text())["step"] == LAST_STEP
    versions = {tuple(row["weight_version"]) for row in read_jsonl(results["checkpoint"] / "samples.jsonl")}
    updates = LAST_STEP * 2
    assert versions == {(updates, updates)}


def test_the_run_itself_kept_its_scores(finished_run: FinishedRun) -> None:
    """Those before training are read back by the start that went on."""
    eval_files = sorted((finished_run.folder / "run" / "eval").iterdir())
    assert [file.name for file in eval_files][:: len(eval_files) - 1] == [
        "step_000000.json",
        f"step_{LAST_STEP:06d}.json",
    ]
