"""Which folders of dumped rollouts a run may train from; that it does, tests/e2e shows."""

import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from grpo_mp.batching.exchange import sample_infos
from grpo_mp.checkpoint.run_state import TrainState, checkpoint_folder, write_manifest
from grpo_mp.config import Settings, dump_settings, load_settings
from grpo_mp.data.cursor import Cursor
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.train import main
from grpo_mp.trainer.collect import RolloutBatch
from grpo_mp.trainer.replay import ReplayCollector, ReplayedRollouts, dump_step, step_file
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Prompt, Sample, SampleGroup
from tests.conftest import TinyRun

STATE = TrainState(1, cursor=Cursor(1, 2, 3, (4, 5)), groups_launched=8, skipped_until={4: 9})
STATS = RewardStats(Counter(a=1), {"a": "why"}, values={"most": [float("inf")]})


@pytest.fixture
def settings(tiny_run: TinyRun) -> Settings:
    return load_settings(tiny_run.config, ["run.steps=2"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of two ranks."""
    for step in (1, 2):
        write(tmp_path / "dump", step)
    return tmp_path / "dump"


def write(folder: Path, step: int) -> None:
    prompt = Prompt(0, "?", (1,))
    groups = [
        SampleGroup(prompt, (Sample(10 * step + rank, 0, (1,), (2,), (-1.0,), (0,), False),)) for rank in range(2)
    ]
    infos = tuple(info for group in groups for info in sample_infos(group))
    for rank, group in enumerate(groups):
        batch = RolloutBatch([group], infos, infos, Counter(surplus=1), STATS, 0, 1.0, STATE)
        dump_step(folder, step, batch, rank, ranks=2)


def open_replay(folder: Path, settings: Settings, first: int) -> ReplayedRollouts:
    replay = ReplayedRollouts(folder, settings.run.steps)
    replay.check_steps(first)
    return replay


def collector_of(replay: ReplayedRollouts, group: dist.ProcessGroup) -> ReplayCollector:
    job: Any = SimpleNamespace(rank=0, world_size=1, group=group)
    phases: Any = SimpleNamespace(phase=lambda *_: nullcontext())
    return ReplayCollector(replay, job, phases)


def test_one_rank_reads_what_two_wrote(folder: Path, settings: Settings, one_rank_group: dist.ProcessGroup) -> None:
    """Only cursor and counters are those of the run that wrote."""
    collector = collector_of(open_replay(folder, settings, first=1), one_rank_group)
    batch = collector.collect(TrainState(step=1, optimizer_step=7), 2)
    assert [group.samples[0].group_id for group in batch.groups] == [20, 21]
    assert [info.group_id for info in batch.infos] == [20, 21]
    assert batch.state == replace(STATE, step=1, optimizer_step=7)
    assert (batch.dropped, batch.reward_stats) == (Counter(surplus=1), STATS)


def test_steps_before_a_damaged_checkpoint_are_replayed(
    folder: Path, settings: Settings, one_rank_group: dist.ProcessGroup
) -> None:
    """What was checked at the start begins behind the checkpoint that turned out to be damaged."""
    collector = collector_of(open_replay(folder, settings, first=2), one_rank_group)
    batch = collector.collect(TrainState(step=0), 1)
    assert [group.samples[0].group_id for group in batch.groups] == [10, 11]
    missing = collector_of(open_replay(folder, settings, first=2), one_rank_group)
    step_file(folder, 1, 1).unlink()
    with pytest.raises(UserError, match="No such file"):
        missing.collect(TrainState(step=0), 1)


def refusal(folder: Path, settings: Settings) -> str:
    with pytest.raises(UserError) as raised:
        open_replay(folder, settings, first=1)
    return str(raised.value)


def test_missing_steps_and_files_are_refused(folder: Path, settings: Settings) -> None:
    longer = settings.model_copy(update={"run": settings.run.model_copy(update={"steps": 3})})
    assert refusal(folder, longer).startswith(f"{folder} has no step 3 of the run's 3: ")
    step_file(folder, 2, 1).unlink()
    assert refusal(folder, settings).startswith(f"{step_file(folder, 2, 1)}: No such file")
    assert isinstance(open_replay(folder, settings, first=3), ReplayedRollouts)  # resumed behind it


def test_damaged_files_are_refused(folder: Path, settings: Settings) -> None:
    file = step_file(folder, 2, 1)
    file.write_bytes(file.read_bytes()[:100])
    assert refusal(folder, settings).startswith(f"{file}: damaged")


def test_the_command_refuses_before_anything_starts(
    folder: Path, tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the model and layout of two ranks, without engines, data, reward functions; then with a step too many."""
    run = tmp_path / "run"
    gone = ["data.train=nowhere.jsonl", "reward.functions={'nowhere.py:gone': 0.5}"]
    start = [str(tiny_run.config), f"run.folder={run}", *gone, "--dry-run", "--ranks", "2"]
    main([*start, "run.steps=2", "--replay", str(folder)])
    out, _ = capfd.readouterr()
    assert f"rollouts: from {folder}\n" in out
    assert "hosted by ranks" not in out
    for arguments, message in (
        (["run.steps=3", "--replay", str(folder)], f"error: {folder} has no step 3"),
        (["run.steps=2", "--replay", str(run / "rollouts_dump")], f"error: {run / 'rollouts_dump'} is of the run in"),
    ):
        with pytest.raises(SystemExit):
            main([*start, *arguments])
        assert capfd.readouterr().err.startswith(message)
    assert not run.exists()


def test_the_command_passes_over_a_damaged_checkpoint(
    folder: Path, tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The step after the one before it must be in the dump."""
    run = tmp_path / "run"
    one_step = tmp_path / "one"
    for step in (1, 2):
        checkpoint = checkpoint_folder(run, step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "common.pt").write_bytes(b"weights")
        write_manifest(checkpoint, TrainState(step=step))
    (checkpoint_folder(run, 2) / "common.pt").write_bytes(b"weig")
    start = [str(tiny_run.config), f"run.folder={run}", "run.steps=2", "--dry-run", "--ranks", "2", "--replay"]
    (run / "settings.yaml").write_text(dump_settings(load_settings(tiny_run.config, start[1:3]).for_replay()))
    main([*start, str(folder)])
    assert f"rollouts: from {folder}\n" in capfd.readouterr().out
    shutil.copytree(folder / "step_000001", one_step / "step_000001")
    with pytest.raises(SystemExit):
        main([*start, str(one_step)])
    assert capfd.readouterr().err.startswith(f"error: {one_step} has no step 2 of the run's 2")
