"""Jobs whose engines have ranks of their own: what they generate ahead, how old it is, how such jobs end."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mp.rollout.dump import read_groups
from grpo_mp.trainer.replay import FOLDER, step_file
from tests.e2e.conftest import StartJob, letters_reward, outcome, run_well
from tests.e2e.jobs import LAUNCH, Job, read_jsonl, spans

pytestmark = pytest.mark.slow
THREE_RANKS = (sys.executable, "-m", "grpo_mp", "train", "--ranks", "3")
UPDATES = 2  # of a step


@pytest.fixture
def start(start_job: StartJob, tmp_path: Path) -> Callable[..., Job]:
    """Start a job in tmp_path/run with one rank for an engine, and a reward in which samples differ."""
    correction = "algorithm.rollout_correction={kind: truncate, high: 2.0}"
    common = (f"run.folder={tmp_path / 'run'}", "engine.ranks=1", letters_reward(tmp_path), correction)

    def run(*overrides: str, command: tuple[str, ...] = LAUNCH) -> Job:
        return start_job(*common, *overrides, command=command)

    return run


AHEAD = ("schedule=one_step_off", "engine.ranks=2", "layout={}", "data.eval={}", "run.export=false")


def check_steps_ahead(folder: Path, last: int) -> None:
    """Each step but the first trains on what the weights before the last update wrote."""
    steps = read_jsonl(folder / "metrics.jsonl")[1:]
    assert [step["step"] for step in steps] == list(range(1, last + 1))
    for step in steps:
        lag = 0 if step["step"] == 1 else UPDATES
        assert step["rollout/weight_version_lag/mean"] == lag
        assert step["rollout/weight_version_lag/max"] == lag
        assert step["rollout/groups"] == 4
        assert step["train/grad_norm"] > 0
        assert step["sync/check/logprob_abs_diff/mean"] <= 1e-4
        assert step["train/samples_seen"] == 16 * step["step"]


@pytest.mark.nightly
def test_the_next_step_is_generated_while_one_trains(start: Callable[..., Job], tmp_path: Path) -> None:
    """Two ranks have an engine each."""
    run_well(start(*AHEAD, "run.steps=4", command=THREE_RANKS))
    check_steps_ahead(tmp_path / "run", 4)


@pytest.mark.nightly
def test_what_was_generated_ahead_is_trained_on_after_a_stop(start: Callable[..., Job], tmp_path: Path) -> None:
    """The signal reaches a rank with an engine; that ranks which are killed change nothing, other tests show."""
    job = start(*AHEAD, "run.steps=20", command=THREE_RANKS)
    job.wait_until(lambda: spans(tmp_path / "run", 0, "TRAIN") >= 3)
    job.signal(signal.SIGUSR1, rank=1)
    run_well(job)
    done = len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) - 1
    assert 2 <= done < 20
    run_well(start(*AHEAD, f"run.steps={done + 2}", command=THREE_RANKS))
    check_steps_ahead(tmp_path / "run", done + 2)


@pytest.mark.parametrize("pause", [pytest.param("retract", marks=pytest.mark.nightly), "in_place"])
def test_engines_take_new_weights_while_requests_run(start: Callable[..., Job], tmp_path: Path, pause: str) -> None:
    """Two ranks train a model of which each has half the experts; evaluations share the engine with the rollouts.

    In place they replay the engine's experts, which its rank sends them, and writes where the step is dumped.
    """
    staleness = 2
    replays = pause == "in_place"
    job = start(
        "schedule=async",
        f"rollout.max_staleness={staleness}",
        f"sync.pause={pause}",
        "run.steps=5",
        "run.eval_every=2",
        "rollout.max_response_tokens=48",
        *(("training.router_replay=R3", "rollout.dump=true") if replays else ()),
        command=THREE_RANKS,
    )
    run_well(job)
    steps = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for step in steps:
        assert step["sync/check/logprob_abs_diff/mean"] <= 1e-4
        assert ("eval/arithmetic/reward" in step) == (step["step"] in (0, 2, 4, 5))
    for step in steps[1:]:
        assert step["rollout/weight_version_lag/max"] <= staleness * UPDATES
        assert step["rollout/groups"] == 4
        assert step.get("rollout/samples_without_routed_experts") == (0 if replays else None)
        assert ("mismatch/router_diff_ratio" in step) == replays
    if replays:
        dumped = [read_groups(step_file(tmp_path / "run" / FOLDER, 2, rank)) for rank in range(3)]
        selected = [[group for group, is_selected in of_rank if is_selected] for of_rank in dumped]
        assert [len(groups) for groups in selected] == [0, 0, 4]
        assert all(sample.routed_experts is not None for group in selected[2] for sample in group.samples)
    assert any(step["rollout/weight_version_lag/max"] for step in steps[1:])
    assert any(step["rollout/carried_groups"] for step in steps[1:])
    assert (tmp_path / "run" / "final" / "config.json").exists()
    assert sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1], ids=["trainer", "engine"])
def test_a_killed_rank_of_either_kind_ends_the_job(start: Callable[..., Job], tmp_path: Path, rank: int) -> None:
    job = start("schedule=async", "layout={}", "data.eval={}", "run.steps=50")
    job.wait_until(lambda: spans(tmp_path / "run", 0, "TRAIN") >= 2)
    job.signal(signal.SIGKILL, rank=rank)
    ended = outcome(job)
    assert ended.status != 0
    assert f"rank {rank}" in ended.err
    assert ended.left == []
