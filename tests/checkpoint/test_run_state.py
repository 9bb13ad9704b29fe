"""Checkpoints and run folders on a real disk: which count, are removed, or refused; a folder's lock."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from grpo_mp.checkpoint import run_state
from grpo_mp.checkpoint.run_lock import LOCK, run_lock
from grpo_mp.checkpoint.run_state import (
    MANIFEST,
    SETTINGS,
    TrainState,
    begin_checkpoint,
    check_run_folder,
    checkpoint_folder,
    claim_run_folder,
    latest_checkpoint,
    prune_checkpoints,
    read_manifest,
    write_manifest,
)
from grpo_mp.data.cursor import Cursor
from grpo_mp.data.template_date import INPUTS
from grpo_mp.utils.errors import UserError

RESOLVED = "run:\n  steps: 10\n  save_every: 2\n  resume: auto\noptimizer:\n  lr: 1.0e-06\n"


def make_state(step: int) -> TrainState:
    return TrainState(
        step=step,
        optimizer_step=2 * step,
        samples_seen=64 * step,
        cursor=Cursor(epoch=1, position=step, seed=3, deferred=(5, 2)),
        solve_rates={4: (0.25, 1.0), 9: (0.5,)},
        skipped_until={11: step + 2},
    )


def save(run: Path, step: int, complete: bool = True) -> Path:
    folder = checkpoint_folder(run, step)
    begin_checkpoint(folder)
    (folder / "policy").mkdir()
    (folder / "policy" / "weights").write_bytes(b"w" * 100)
    if complete:
        write_manifest(folder, make_state(step))
    return folder


def test_the_state_is_read_back(tmp_path: Path) -> None:
    assert read_manifest(save(tmp_path, 7)) == make_state(7)
    folder = checkpoint_folder(tmp_path, 8)
    begin_checkpoint(folder)
    write_manifest(folder, TrainState())
    assert read_manifest(folder) == TrainState()


def test_a_checkpoint_counts_once_it_has_a_manifest(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 4)
    save(tmp_path, 12)
    damaged = save(tmp_path, 20, complete=False)
    (damaged / (MANIFEST + ".incomplete")).write_text("{")
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 12)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_is_cut_or_gone_is_named(damage: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 6)
    weights = folder / "policy" / "weights"
    weights.write_bytes(b"w" * 99) if damage == "cut" else weights.unlink()
    with pytest.raises(UserError, match=r"step_000006: damaged checkpoint, policy/weights is missing or cut short"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"state": {"unknown": 1}, "files": {}}),
        json.dumps({"state": asdict(make_state(1)), "files": 3}),
    ],
)
def test_another_kind_of_manifest_is_refused(text: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=r"not a checkpoint manifest .*: copy it again, or rename step_000001 to"):
        read_manifest(folder)


@pytest.mark.parametrize("keep", [2, 9])
def test_pruning_keeps_the_newest_complete_checkpoints(keep: int, tmp_path: Path) -> None:
    for step in (2, 4, 10, 6):
        save(tmp_path, step)
    save(tmp_path, 12, complete=False)
    prune_checkpoints(tmp_path, keep)
    remaining = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert remaining == [f"step_{step:06d}" for step in [2, 4, 6, 10][-keep:]] + ["step_000012"]


@pytest.mark.parametrize("name", ["step_000080_backup_of_60", "step_0000099"])
def test_copies_that_users_make_are_neither_chosen_nor_removed(name: str, tmp_path: Path) -> None:
    for step in (60, 80, 100):
        save(tmp_path, step)
    copy = tmp_path / "checkpoints" / name
    shutil.copytree(checkpoint_folder(tmp_path, 60), copy)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 100)
    prune_checkpoints(tmp_path, 1)
    assert sorted(path.name for path in copy.parent.iterdir()) == sorted([name, "step_000100"])
    checkpoint_folder(tmp_path, 100).rename(tmp_path / "checkpoints" / "step_000100.bad")
    assert latest_checkpoint(tmp_path) is None


def test_pruning_takes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)

    def killed(folder: Path) -> None:
        assert not (folder / MANIFEST).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(run_state.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoints(tmp_path, 1)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 4)


def test_a_new_folder_is_claimed_and_resumed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    check_run_folder(run, RESOLVED, resume=True)
    assert not run.exists()
    claim_run_folder(run, RESOLVED)
    assert {path.name for path in run.iterdir()} == {SETTINGS, INPUTS}
    assert (run / SETTINGS).read_text() == RESOLVED
    save(run, 2)
    check_run_folder(run, RESOLVED.replace("steps: 10", "steps: 99").replace("save_every: 2", "save_every: 5"), True)


LOGIN = "reward:\n  judge:\n    url: https://me:hush-hush@judge:8000/v1\n"


def test_settings_that_hold_a_login_are_for_this_user_alone(tmp_path: Path) -> None:
    for name, text, others in (("open", "", 0o044), ("private", LOGIN, 0)):
        claim_run_folder(tmp_path / name, RESOLVED + text)
        file = tmp_path / name / SETTINGS
        assert file.stat().st_mode & 0o077 & ~own_umask() == others & ~own_umask()
        assert file.read_text() == RESOLVED + text


def own_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_a_kill_left_of_a_checkpoint_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """Of a save, or of the removal of an old one; copies that users made stay."""
    claim_run_folder(tmp_path, RESOLVED)
    for step in (2, 4):
        save(tmp_path, step)
    (checkpoint_folder(tmp_path, 2) / MANIFEST).unlink()
    mine = checkpoint_folder(tmp_path, 2).with_name("step_000002_best")
    mine.mkdir()
    claim_run_folder(tmp_path, RESOLVED)
    assert sorted(mine.parent.iterdir()) == [mine, checkpoint_folder(tmp_path, 4)]


@pytest.mark.parametrize("trace", ["checkpoint", "metrics"])
def test_results_of_other_settings_are_refused(trace: str, tmp_path: Path) -> None:
    claim_run_folder(tmp_path, RESOLVED)
    other = RESOLVED + "  eps: 1.0e-06\n"
    check_run_folder(tmp_path, other, resume=True)
    save(tmp_path, 2) if trace == "checkpoint" else (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"other settings \(optimizer.eps was 1e-08, is now 1e-06\): choose another"):
        check_run_folder(tmp_path, other, resume=True)
    (tmp_path / SETTINGS).write_text("run: [")
    with pytest.raises(UserError, match=r"settings.yaml: not valid YAML"):
        check_run_folder(tmp_path, RESOLVED, resume=True)
    (tmp_path / SETTINGS).unlink()
    with pytest.raises(UserError, match=r"it has no settings.yaml"):
        check_run_folder(tmp_path, RESOLVED, resume=True)


def test_checkpoints_are_not_overwritten_without_resume(tmp_path: Path) -> None:
    claim_run_folder(tmp_path, RESOLVED)
    save(tmp_path, 2)
    with pytest.raises(UserError, match=r"set run.resume=auto to resume it, or move it away"):
        check_run_folder(tmp_path, RESOLVED, resume=False)


def test_a_torn_checkpoint_is_found_before_the_run_starts(tmp_path: Path) -> None:
    claim_run_folder(tmp_path, RESOLVED)
    (save(tmp_path, 2) / "policy" / "weights").unlink()
    with pytest.raises(UserError, match="damaged checkpoint"):
        check_run_folder(tmp_path, RESOLVED, resume=True)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="is not a folder that can be written to"):
            check_run_folder(folder, RESOLVED, resume=True)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ("run: {steps: 20}", ""),
        ("layout: {tensor: 2}", ""),
        ("training: {megatron_args: {num_layers_in_first_pipeline_stage: 2}}", ""),
        (
            "training: {megatron_args: {use_precision_aware_optimizer: true}}",
            "training.megatron_args.use_precision_aware_optimizer was None, is now True",
        ),
        ("engine: {args: {ep_size: 2}}", ""),
        ("training: {recompute: full}", ""),
        ("training: {epochs: 2}", "training.epochs was 1, is now 2"),
        ("optimizer: {lr: 1.0, min_lr: 0.5, warmup_updates: 3, lr_schedule: cosine}", ""),
        ("reward: {timeout_s: 5.0, code: {timeout_s: 3.0}}", ""),
        ("rollout: {temperature: 0.5}", "rollout.temperature was 1.0, is now 0.5"),
        ("data: {eval: {new: {path: a.jsonl, samples: 4}}}", ""),
        ("data: {system_prompt: Think.}", "data.system_prompt was None, is now 'Think.'"),
        ("optimizer: {offload: host}", ""),
        ("rollout: {max_staleness: 1}", "rollout.max_staleness was 0, is now 1"),
    ],
)
def test_settings_that_a_resumed_run_may_change(change: str, refused: str, tmp_path: Path) -> None:
    claim_run_folder(tmp_path, RESOLVED)
    save(tmp_path, 4)
    tree = yaml.safe_load(RESOLVED)
    for section, values in yaml.safe_load(change).items():
        tree.setdefault(section, {}).update(values)
    if not refused:
        check_run_folder(tmp_path, yaml.safe_dump(tree), True)
        return
    with pytest.raises(UserError, match=re.escape(f"a run of other settings ({refused})")):
        check_run_folder(tmp_path, yaml.safe_dump(tree), True)


HOLD = """
import os, sys, time
from pathlib import Path
from grpo_mp.checkpoint.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    child = os.fork()  # as a writer of checkpoints that outlives its rank
    if child:
        print(child, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    """A process that holds the lock, and has a child."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        yield process
        process.kill()
        os.kill(child, 9)


def test_a_second_job_is_refused_by_the_name_of_the_first(
    tmp_path: Path, holder: "subprocess.Popen[str]", caplog: pytest.LogCaptureFixture
) -> None:
    sentence = rf"run: another job writes there \(host .*, process {holder.pid}\): stop it, or choose another run.fol"
    with pytest.raises(UserError, match=sentence), run_lock(tmp_path / "run", wait_s=0.5):
        pass
    assert len(caplog.messages) == 1
    assert f"process {holder.pid}" in (tmp_path / "run" / LOCK).read_text()
    with run_lock(tmp_path / "other", wait_s=0):
        pass


def test_the_lock_of_a_killed_job_is_gone_while_its_child_lives(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    holder.kill()
    with run_lock(tmp_path / "run", wait_s=60):
        assert (tmp_path / "run" / LOCK).read_text().endswith(f"process {os.getpid()}\n")
