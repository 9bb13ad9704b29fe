"""The steps of a run's second job, trained once more from what it dumped: no engine, the same weights bit for bit."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_mp.checkpoint.run_state import checkpoint_folder, read_manifest, write_manifest
from tests.e2e.conftest import LAST_STEP, FinishedRun, StartJob, finished_settings, outcome, run_well
from tests.e2e.jobs import ALONE, LAUNCH, Job, read_jsonl, spans

pytestmark = pytest.mark.slow
OF_ROLLOUTS = ("train/", "reward/", "rollout/", "mismatch/")


def replay(run: FinishedRun, start_job: StartJob, folder: Path, *overrides: str, ranks: int = 2) -> Path:
    """Go on to the end from the checkpoint that the first job left."""
    run_well(replayed(run, start_job, folder, *overrides, ranks=ranks))
    assert not list(folder.glob("logs/engine_*"))
    assert not any(spans(folder, 0, name) for name in ("GENERATE", "SYNC", "CHECK", "EVAL"))
    return folder


def replayed(run: FinishedRun, start_job: StartJob, folder: Path, *overrides: str, ranks: int = 2) -> Job:
    first = run.folder / "run"
    checkpoint = f"checkpoints/step_{run.stopped_after:06d}"
    shutil.copytree(first / checkpoint, folder / checkpoint, dirs_exist_ok=True)
    written = (first / "settings.yaml").read_text()
    (folder / "settings.yaml").write_text(written.replace(f"folder: {first}\n", f"folder: {folder}\n"))
    settings = (*finished_settings(run.folder), f"run.steps={LAST_STEP}", f"run.folder={folder}", *overrides)
    arguments = (*settings, "--replay", str(first / "rollouts_dump"))
    return start_job(*arguments, command=LAUNCH if ranks == 2 else ALONE)


def damage(run: Path, step: int, folder: Path) -> None:
    """Make a checkpoint after the next step, of which a file is cut short."""
    checkpoint = checkpoint_folder(folder, step + 1)
    shutil.copytree(checkpoint_folder(run, step), checkpoint)
    write_manifest(checkpoint, replace(read_manifest(checkpoint), step=step + 1))
    file = max(checkpoint.rglob("*.bin"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])


def values(folder: Path, after: int) -> list[Mapping[str, float]]:
    """What each step says of its rollouts and updates, but for seconds and memory."""
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if line["step"] > after]
    assert len(lines) == LAST_STEP - after
    return [{name: value for name, value in line.items() if name.startswith(OF_ROLLOUTS)} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("final/*.safetensors") for name, tensor in load_file(file).items()}


def test_a_replay_makes_the_same_updates(finished_run: FinishedRun, start_job: StartJob, tmp_path: Path) -> None:
    """Among them routed experts, adaptive KL, and the step that the stopped job had begun.

    A newer checkpoint of the replay is damaged.
    """
    run = finished_run.folder / "run"
    stopped = finished_run.stopped_after
    damage(run, stopped, tmp_path / "replayed")
    folder = replay(finished_run, start_job, tmp_path / "replayed")
    assert (folder / "checkpoints" / f"step_{stopped + 1:06d}.damaged").is_dir()
    assert values(folder, stopped) == values(run, stopped)
    before = weights(run)
    after = weights(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.nightly
def test_another_layout_makes_them_to_rounding(finished_run: FinishedRun, start_job: StartJob, tmp_path: Path) -> None:
    """One rank reads the files of two."""
    folder = replay(finished_run, start_job, tmp_path / "alone", "layout.expert=1", ranks=1)
    run = finished_run.folder / "run"
    stopped = finished_run.stopped_after
    for again, first in zip(values(folder, stopped), values(run, stopped), strict=True):
        for name in ("train/loss", "train/grad_norm", "reward/mean"):
            assert again[name] == pytest.approx(first[name], rel=1e-3, abs=1e-6), name
    assert all(torch.allclose(tensor, weights(run)[name], atol=1e-4) for name, tensor in weights(folder).items())


@pytest.mark.nightly
def test_a_guard_ends_the_run_before_its_step_is_saved(
    finished_run: FinishedRun, start_job: StartJob, tmp_path: Path
) -> None:
    """On all ranks; the step's metrics are written."""
    guard = "monitor.guards={train/entropy: {min: 1.0e+9}}"
    result = outcome(replayed(finished_run, start_job, tmp_path, guard, "run.save_every=1"))
    step = finished_run.stopped_after + 1
    assert (result.status, result.left) == (2, [])
    assert re.match(rf"error: step {step}: train/entropy was below 1e\+09 .*the run stops", result.err), result.err
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")][-1] == step
    assert [folder.name for folder in tmp_path.glob("checkpoints/*")] == [f"step_{step - 1:06d}"]
