"""Jobs that end badly: one sentence, a status that is not 0, no trace for a user's mistake, no process left."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyRun
from tests.e2e.conftest import REWARD, Outcome, StartJob, outcome
from tests.e2e.jobs import ALONE, TORCHRUN, read_jsonl, spans

PEER_LOST = "another rank failed; see its error"
# No handler of Python sees this end, and its status says that all is well.
VANISHING = """
import ctypes, os
def vanishing(completions, **_):
    if os.environ["RANK"] == "1":
        ctypes.CDLL(None)._exit(0)
    return [0.0] * len(completions)
"""
NO_EVAL = "data.eval={}"
LOADS = "Load weight begin"
ONE_ENGINE = "engine.gpus_per_engine=2"


def sentences(result: Outcome) -> list[str]:
    """What the job said on stderr, without the lines of ranks that only lost the one that knows."""
    return [line for line in result.err.splitlines() if PEER_LOST not in line]


def test_a_mistake_under_torchrun_is_said_by_one_rank_and_last(start_job: StartJob, tmp_path: Path) -> None:
    result = outcome(start_job(f"run.folder={tmp_path / 'run'}", "layout.expert=3", command=TORCHRUN))
    assert result.status == 1
    sentence = "error: layout: expert_tensor x expert x pipeline = 3 does not divide the 2 ranks"
    lines = result.err.splitlines()
    assert lines[0].startswith(sentence)
    assert sentence in lines[-2]  # torchrun's summary, before its closing rule
    assert result.err.count(sentence) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_an_engine_that_does_not_come_up_shows_its_log(start_job: StartJob, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = outcome(start_job(f"run.folder={run}", "engine.args={attention_backend: no_such}"))
    assert result.status == 2
    first, *log = sentences(result)
    assert first.startswith("error: engine ")
    assert f"ended while starting; the last lines of {run / 'logs' / 'engine_'}" in first
    assert len(log) <= 12
    assert "no_such" in "".join(log)
    assert result.left == []


@pytest.mark.slow
def test_an_engine_that_computes_another_function_stops_the_run_and_is_not_restarted(
    start_job: StartJob, tmp_path: Path
) -> None:
    """All of its tensors are right; its norms are not."""
    run = tmp_path / "run"
    args = """engine.args={json_model_override_args: '{"rms_norm_eps": 0.01}'}"""
    result = outcome(start_job(f"run.folder={run}", NO_EVAL, ONE_ENGINE, args, "sync.check_tolerance=null"))
    assert result.status == 2
    sentence = next(line for line in result.err.splitlines() if line.startswith("error: "))
    assert sentence.startswith("error: after the weight sync engine ")
    assert "a second sync changes nothing: the engine computes another function" in sentence
    assert not [*(run / "logs").glob("engine_*_lost_*.log")]
    assert result.left == []


@pytest.mark.nightly
def test_updates_skipped_in_a_row_stop_the_run_and_its_dump_replays_it(start_job: StartJob, tmp_path: Path) -> None:
    """The replay, without engines, meets the same gradients to the last digit that is said."""
    run = tmp_path / "run"
    replayed = tmp_path / "replayed"
    (tmp_path / "reward.py").write_text(REWARD)  # samples differ in it: no gradient is 0
    reward = (f"reward.functions={{{tmp_path / 'reward.py'}:letters: 1.0}}", "training.updates_per_step=1")
    limits = (NO_EVAL, *reward, "run.steps=3", "optimizer.skip_grad_norm=1e-9")
    result = outcome(start_job(f"run.folder={run}", ONE_ENGINE, *limits, "rollout.dump=true"))
    assert (result.status, result.left) == (2, [])
    (sentence,) = sentences(result)
    dump = run / "rollouts_dump"
    assert sentence.startswith("error: step 3: update skipped, 3 in a row: gradient norm ")
    assert "; the run stops after 3 skipped updates" in sentence
    assert "step 1: update skipped, 1 in a row: " in result.out
    steps = read_jsonl(run / "metrics.jsonl")[1:]
    assert [(step["train/skipped_updates"], step["train/tokens"]) for step in steps] == [(1, 0)] * 2
    again = outcome(start_job(f"run.folder={replayed}", *limits, "--replay", str(dump)))
    assert (again.status, sentences(again)) == (2, [sentence])


@pytest.mark.nightly
def test_a_reward_that_hangs_stops_every_rank(start_job: StartJob, tmp_path: Path) -> None:
    file = tmp_path / "hanging.py"
    file.write_text("def hanging(completions, **_):\n    while True:\n        pass\n")
    reward = (f"reward.functions={{{file}:hanging: 1.0}}", "reward.timeout_s=2")
    result = outcome(start_job(f"run.folder={tmp_path / 'run'}", NO_EVAL, ONE_ENGINE, *reward))
    assert result.status == 2
    (sentence,) = sentences(result)
    assert sentence.startswith("error: reward hanging: prompt ")
    assert "took longer than reward.timeout_s=2 s; sample 0: " in sentence
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert result.left == []


@pytest.mark.nightly
def test_a_rank_that_vanishes_with_status_0_takes_the_job_with_it(start_job: StartJob, tmp_path: Path) -> None:
    """Under torchrun nobody but its peers can miss it."""
    run = tmp_path / "run"
    file = tmp_path / "vanishing.py"
    file.write_text(VANISHING)
    result = outcome(
        start_job(f"run.folder={run}", NO_EVAL, f"reward.functions={{{file}:vanishing: 1.0}}", command=TORCHRUN)
    )
    assert result.status == 1
    assert re.search(rf"rank 0 in \w+: {PEER_LOST}", result.err)
    assert not (run / "checkpoints").exists()
    assert result.left == []


@pytest.mark.nightly
def test_the_doctor_names_a_stopped_rank_and_a_killed_one_takes_the_job_with_it(
    start_job: StartJob, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    doctor = [sys.executable, "-m", "grpo_mp", "doctor", "stuck", str(run), "--timeout-s"]
    job = start_job(f"run.folder={run}", NO_EVAL, "run.steps=1000")  # it does not end before it is killed
    job.wait_until(lambda: spans(run, 1, "GENERATE"))
    healthy = subprocess.run([*doctor, "60"], capture_output=True, text=True, check=False)
    assert (healthy.returncode, healthy.stderr) == (0, ""), healthy.stdout
    for rank in (0, 1):
        assert re.search(rf"ranks? (0, )?{rank}.* in (no phase|\w+ for \d+ s.*), at grpo_mp/", healthy.stdout)
    assert re.search(r"engine of rank 1, sglang::scheduler.*: /", healthy.stdout)
    job.signal(signal.SIGSTOP, rank=1)
    stopped = subprocess.run([*doctor, "5"], capture_output=True, text=True, check=False)
    assert stopped.returncode == 1
    assert stopped.stdout.startswith("error: rank 1: did not answer in 5 s")
    job.signal(signal.SIGKILL, rank=1)
    result = outcome(job)
    assert result.status == 128 + signal.SIGKILL
    assert sentences(result) == ["error: rank 1 was ended by SIGKILL"]
    assert result.left == []


@pytest.mark.slow
def test_ctrl_c_ends_ranks_and_engines(start_job: StartJob, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = start_job(f"run.folder={run}", NO_EVAL)
    # Until the models are built, ranks may wait for each other in C++, where Ctrl-C is not seen; engines load later.
    logs = [run / "logs" / f"engine_{engine}.log" for engine in (0, 1)]
    job.wait_until(lambda: all(log.exists() and LOADS in log.read_text() for log in logs))
    job.signal(signal.SIGINT)
    result = outcome(job)
    assert result.status == 128 + signal.SIGINT
    assert sentences(result) == ["rank 0 in START: stopped by Ctrl-C"]
    assert result.left == []


def test_without_a_launcher_the_job_has_one_rank(start_job: StartJob, tiny_run: TinyRun) -> None:
    result = outcome(start_job("layout.expert=2", command=ALONE))
    assert result.status == 2
    assert result.err.startswith("error: layout: expert_tensor x expert x pipeline = 2 does not divide the 1 ranks")
    assert not (tiny_run.folder / "run").exists()
