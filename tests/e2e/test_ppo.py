"""PPO with a critic: it warms up, learns beside the policy, and a run that resumes has the same numbers."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.run_state import checkpoint_folder
from tests.conftest import TinyRun
from tests.e2e.conftest import StartJob, letters_reward, run_well
from tests.e2e.jobs import read_jsonl
from tests.parallel.full_model import file_tensors
from tests.parallel.inputs import fixed_head
from tests.reward_models import make_reward_model

pytestmark = pytest.mark.slow
WEIGHTS = "model.safetensors"
STEPS = 3
METRICS = ("value_loss", "vf_clipfrac", "explained_variance", "value_mean", "return_mean", "grad_norm", "lr")


def make_dense_critic(model: Path, folder: Path) -> None:
    """A reward model of another family and size than the policy, without experts."""
    make_reward_model(folder, model)


def make_critic(model: Path, folder: Path) -> None:
    """A reward model's folder: the policy's decoder, and a head in place of its output layer."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / WEIGHTS)
    width = tensors.pop("lm_head.weight").shape[1]
    save_file(tensors | {"score.weight": fixed_head(width)}, folder / WEIGHTS, {"format": "pt"})


ASYNC = ("schedule=async", "rollout.max_staleness=1", "engine.ranks=1", "layout={}")


def settings_of(folder: Path) -> tuple[str, ...]:
    """Settings of a run in `folder`, whose critic is in it, too."""
    return (
        *("algorithm=ppo", "algorithm.lam=0.9", "rollout.group_size=1", "rollout.prompts_per_step=16"),
        f"critic={{path: {folder / 'critic'}, lr: 0.003, cliprange_value: 0.5, warmup_steps: 1}}",
        *(f"run.folder={folder / 'run'}", f"run.steps={STEPS}", "run.save_every=1", "run.keep_checkpoints=4"),
        *("data.eval={}", "engine.deterministic=true", "optimizer.lr_schedule=constant"),
        letters_reward(folder),
    )


@pytest.mark.parametrize(
    ("changes", "make"),
    [
        pytest.param((), make_critic, marks=pytest.mark.nightly, id=""),
        pytest.param((), make_dense_critic, id="dense"),
        pytest.param(ASYNC, make_critic, marks=pytest.mark.nightly, id="async"),
    ],
)
def test_a_run_with_a_critic_resumes_with_the_same_numbers(
    start_job: StartJob,
    tiny_run: TinyRun,
    tmp_path: Path,
    changes: tuple[str, ...],
    make: Callable[[Path, Path], None],
) -> None:
    run = tmp_path / "run"
    schedule = changes is ASYNC
    make(tiny_run.model, tmp_path / "critic")
    settings = (*settings_of(tmp_path), *changes)
    run_well(start_job(*settings))
    steps = read_jsonl(run / "metrics.jsonl")[1:]
    critic = [{name: step[f"critic/{name}"] for name in METRICS} for step in steps]
    assert all(math.isfinite(value) for step in critic for value in step.values())
    assert [step["train/updates"] for step in steps] == [0, 2, 2]  # the critic alone in the first
    assert [step["sync/weight_version"] for step in steps] == [0, 2, 4]
    assert critic[0]["value_mean"] != 0  # its head is the folder's
    assert critic[-1]["value_loss"] < 0.7 * critic[0]["value_loss"]
    assert [step["lr"] for step in critic] == [0.003] * STEPS
    fresh = steps[1:2] if schedule else steps[1:]  # of weights that the step before has not changed
    assert all(step["mismatch/logprob_abs_diff/mean"] <= 1e-4 for step in fresh)

    final = file_tensors(run / "final")
    assert final.keys() == file_tensors(tiny_run.model).keys()  # a policy's, without the critic
    for step in range(2, STEPS + 1):
        shutil.rmtree(checkpoint_folder(run, step))
    shutil.rmtree(run / "final")
    assert "resumes after step 1" in run_well(start_job(*settings)).out
    resumed = read_jsonl(run / "metrics.jsonl")[1:]
    assert [{name: step[f"critic/{name}"] for name in METRICS} for step in resumed] == critic
    weights = file_tensors(run / "final")
    assert [name for name in final if not torch.equal(final[name], weights[name])] == []
