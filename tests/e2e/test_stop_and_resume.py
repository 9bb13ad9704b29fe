"""A run that is told to stop saves its state; the same command resumes as if it had never stopped."""

import json
import signal
from pathlib import Path

import pytest

from grpo_mp.checkpoint.run_state import checkpoint_folder, latest_checkpoint
from grpo_mp.data.cursor import Cursor, take
from tests.conftest import TRAIN_PROMPTS, TinyRun
from tests.e2e.conftest import LAST_STEP, FinishedRun, StartJob, letters_reward, outcome, run_well
from tests.e2e.jobs import ALONE, read_jsonl

LR = 1e-3
PROMPTS_PER_STEP = 4
SAMPLES_PER_STEP = 16
UPDATES_PER_STEP = 2


def test_the_step_in_hand_is_finished_and_saved(finished_run: FinishedRun) -> None:
    assert finished_run.first.status == 0, finished_run.first.err
    assert finished_run.stopped_after == 2
    assert "stopped after step 2: run the same command to resume" in finished_run.first.out
    assert finished_run.first.err == ""


@pytest.mark.nightly
def test_a_run_that_is_stopped_while_it_starts_does_neither_step_nor_evaluation(
    start_job: StartJob, tmp_path: Path
) -> None:
    """Its first sync, check and evaluation may take long; there is nothing to be saved."""
    run = tmp_path / "run"
    job = start_job(f"run.folder={run}", "engine.gpus_per_engine=2")
    job.wait_until(lambda: "starting the engines" in job.out)
    job.signal(signal.SIGTERM)
    result = outcome(job)
    assert (result.status, result.left) == (0, []), result.err
    assert "stopped after step 0: run the same command to resume" in result.out
    assert not any("eval/" in name for line in read_jsonl(run / "metrics.jsonl") for name in line)
    assert not any("sync/" in name for line in read_jsonl(run / "metrics.jsonl") for name in line)


def test_what_is_done_has_its_report(finished_run: FinishedRun) -> None:
    assert f"{finished_run.stopped_after} of {LAST_STEP - 1}" in finished_run.stopped_report


def test_the_second_job_goes_on_there(finished_run: FinishedRun) -> None:
    assert finished_run.second.status == 0, finished_run.second.err
    assert "resumes after step 2" in finished_run.second.out
    assert finished_run.second.err == ""


def test_each_step_is_logged_once(finished_run: FinishedRun) -> None:
    """Step 0 is the first sync and evaluation."""
    steps = [line["step"] for line in read_jsonl(finished_run.folder / "run" / "metrics.jsonl")]
    assert steps == list(range(LAST_STEP + 1))


def test_the_last_checkpoint_counts_every_step(finished_run: FinishedRun) -> None:
    run = finished_run.folder / "run"
    assert latest_checkpoint(run) == checkpoint_folder(run, LAST_STEP)
    state = json.loads((checkpoint_folder(run, LAST_STEP) / "manifest.json").read_text())["state"]
    updates = LAST_STEP * UPDATES_PER_STEP
    assert (state["step"], state["optimizer_step"]) == (LAST_STEP, updates)
    assert state["samples_seen"] == LAST_STEP * SAMPLES_PER_STEP
    assert state["cursor"]["position"] == LAST_STEP * PROMPTS_PER_STEP


def test_the_learning_rate_follows_the_settings_of_each_job(finished_run: FinishedRun) -> None:
    """Linear decay to zero over all updates; the last update of each step is logged."""
    lines = read_jsonl(finished_run.folder / "run" / "metrics.jsonl")
    for line in lines[1:]:
        step = int(line["step"])
        steps = LAST_STEP - 1 if step <= finished_run.stopped_after else LAST_STEP
        done = step * UPDATES_PER_STEP - 1
        assert abs(line["train/lr"] - LR * (1 - done / (steps * UPDATES_PER_STEP))) < 1e-9, step


def test_prompts_match_uninterrupted_run(finished_run: FinishedRun, tiny_run: TinyRun) -> None:
    questions = [row["question"] for row in read_jsonl(tiny_run.train)]
    cursor = Cursor(seed=0)
    for step in range(1, LAST_STEP + 1):
        indices, cursor = take(cursor, TRAIN_PROMPTS, PROMPTS_PER_STEP, shuffle=True)
        file = finished_run.folder / "run" / "samples" / f"step_{step:06d}.jsonl"
        samples = read_jsonl(file) if file.exists() else []
        assert {sample["prompt"] for sample in samples} <= {questions[index] for index in indices}
        assert {sample["group_id"] // PROMPTS_PER_STEP for sample in samples} <= {step - 1}


def test_a_second_job_beside_it_is_refused(finished_run: FinishedRun) -> None:
    assert f"{finished_run.folder / 'run'}: another job writes there (host " in finished_run.second_job


def test_no_process_is_left(finished_run: FinishedRun) -> None:
    assert finished_run.first.left == finished_run.second.left == []


@pytest.mark.nightly
def test_a_run_is_resumed_on_more_ranks_with_another_engine(start_job: StartJob, tmp_path: Path) -> None:
    brief = (f"run.folder={tmp_path / 'run'}", letters_reward(tmp_path), "data.eval={}", "run.save_every=1")
    run_well(start_job(*brief, "run.steps=1", "layout={}", command=ALONE))
    run_well(start_job(*brief, "run.steps=2", "layout={tensor: 2}", "engine.gpus_per_engine=2"))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2]["train/optimizer_step"] == 2 * lines[1]["train/optimizer_step"]
    assert lines[2]["sync/check/logprob_abs_diff/mean"] <= 1e-4
