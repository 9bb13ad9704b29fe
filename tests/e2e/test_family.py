"""Filters, controllers, early stopping and rewards of the family in the real loop."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import REWARD, StartJob, run_well
from tests.e2e.jobs import read_jsonl

pytestmark = pytest.mark.slow
Steps = list[dict[str, float]]
Train = Callable[..., Steps]
STEPWISE = """
def halves(completion_ids, **_):
    first = [[(len(ids) // 2 - 1, float(ids[0] % 3))] * (len(ids) > 1) for ids in completion_ids]
    return [[*steps, (len(ids) - 1, len(ids) / 10)] for steps, ids in zip(first, completion_ids)]
"""

SOME = """
def some(**arguments):
    return [float(value >= 0.1) for value in letters(**arguments)]
"""


@pytest.fixture
def train(start_job: StartJob, tmp_path: Path) -> Train:
    """Run with a reward in which samples differ; the lines of metrics.jsonl after that of step 0."""
    (tmp_path / "reward.py").write_text(REWARD + SOME)

    def run(*overrides: str) -> Steps:
        file = tmp_path / "reward.py"
        reward = f"reward={{functions: {{{file}:letters: 1.0, {file}:some: 0.0}}, correct: some}}"
        always = (f"run.folder={tmp_path / 'run'}", "data.eval={}", "run.export=false", reward)
        run_well(start_job(*always, *overrides))
        return read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]

    return run


@pytest.mark.nightly
def test_adaptive_state_survives_restart(train: Train, tmp_path: Path) -> None:
    algorithm = (
        "algorithm={preset: dapo, rollout_correction: {kind: truncate, high: 2.0}, "
        "entropy: {top_quantile: 0.5, target: 0.1}, "
        "kl: {coef: 0.01, target: 0.001, ref_update_every: 1, ref_update_mix: 0.5}, "
        "filter: {zero_std: refill, metric: reward, oversample_factor: 1.5}, "
        "curriculum: {window: 1, max_rate: 0.99}}"
    )
    train(algorithm, "run.steps=2")
    assert (tmp_path / "run" / "checkpoints" / "step_000002" / "reference").is_dir()
    steps = train(algorithm, "run.steps=4")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["rollout/launched_groups"] >= 6
        assert step["rollout/launched_groups"] - step["rollout/dropped_groups/surplus"] >= 4
        assert step["mismatch/logprob_abs_diff/mean"] <= 1e-4
    weights = [step["train/adaptive_coef/kl"] for step in steps]
    for before, step in zip([0.01, *weights], steps, strict=False):
        error = min(max(step["train/kl_loss"] / 0.001 - 1, -0.2), 0.2)
        assert step["train/adaptive_coef/kl"] == pytest.approx(
            before * (1 + 0.1 * error) ** step["train/updates"], rel=0.04
        )
    assert all(step["train/kl_loss"] > 0 for step in steps[1:])


@pytest.mark.nightly
def test_oversampling_and_early_stop(train: Train) -> None:
    parts = "algorithm={filter: {oversample_factor: 3.0}, early_stop: {max_kl: 1.0e-12}}"
    for step in train(parts, "run.steps=2", "training.updates_per_step=4"):
        assert step["rollout/launched_groups"] <= 12
        dropped = step["rollout/dropped_groups/unfinished"] + step["rollout/dropped_groups/surplus"]
        assert step["rollout/launched_groups"] - dropped == 4
        assert step["rollout/length_bias"] > 0
        # The first update is on policy; the second sees the drift, and the other two are left out.
        assert (step["train/updates"], step["train/early_stopped_updates"]) == (2, 2)


@pytest.mark.nightly
def test_rewards_of_steps(train: Train, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPWISE)
    steps = train("algorithm=grpo_process", f"reward={{steps: '{tmp_path / 'steps.py'}:halves'}}", "run.steps=2")
    assert all(step["train/grad_norm"] > 0 and step["reward/term/steps"] > 0 for step in steps)


@pytest.mark.nightly
def test_groups_of_one_with_the_kl_in_the_reward(train: Train) -> None:
    steps = train("algorithm=reinforce_pp", "rollout.group_size=1", "rollout.prompts_per_step=16", "run.steps=2")
    assert all(step["train/grad_norm"] > 0 for step in steps)
