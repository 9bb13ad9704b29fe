"""A run of two jobs, trained once more from what it dumped: no engine, the same weights bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import LAST_STEP, FinishedRun, StartJob, finished_settings, outcome
from tests.e2e.jobs import ALONE, LAUNCH, read_jsonl, spans

pytestmark = pytest.mark.slow
OF_ROLLOUTS = ("train/", "reward/", "rollout/", "mismatch/")


def replay(run: FinishedRun, start_job: StartJob, folder: Path, *overrides: str, ranks: int = 2) -> Path:
    settings = (*finished_settings(run.folder), f"run.steps={LAST_STEP}", f"run.folder={folder}", *overrides)
    arguments = (*settings, "--replay", str(run.folder / "run" / "rollouts_dump"))
    result = outcome(start_job(*arguments, command=LAUNCH if ranks == 2 else ALONE))
    assert (result.status, result.err, result.left) == (0, "", [])
    assert not list(folder.glob("logs/engine_*"))
    assert not any(spans(folder, 0, name) for name in ("GENERATE", "SYNC", "CHECK", "EVAL"))
    return folder


def values(folder: Path) -> list[Mapping[str, float]]:
    """What each step says of its rollouts and updates, but for seconds and memory."""
    lines = read_jsonl(folder / "metrics.jsonl")[1:]
    return [{name: value for name, value in line.items() if name.startswith(OF_ROLLOUTS)} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("final/*.safetensors") for name, tensor in load_file(file).items()}


def test_a_replay_makes_the_same_updates(finished_run: FinishedRun, start_job: StartJob, tmp_path: Path) -> None:
    """Routed experts, adaptive KL and what a stopped job repeated among them."""
    replayed, run = replay(finished_run, start_job, tmp_path / "replayed"), finished_run.folder / "run"
    assert len(values(replayed)) == LAST_STEP
    assert values(replayed) == values(run)
    before, after = weights(run), weights(replayed)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_layout_makes_them_to_rounding(finished_run: FinishedRun, start_job: StartJob, tmp_path: Path) -> None:
    """One rank reads the files of two."""
    replayed = replay(finished_run, start_job, tmp_path / "alone", "layout.expert=1", ranks=1)
    run = finished_run.folder / "run"
    for again, first in zip(values(replayed), values(run), strict=True):
        for name in ("train/loss", "train/grad_norm", "reward/mean"):
            assert again[name] == pytest.approx(first[name], rel=1e-3, abs=1e-6), name
    assert all(torch.allclose(tensor, weights(run)[name], atol=1e-4) for name, tensor in weights(replayed).items())
