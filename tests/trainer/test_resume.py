"""Which checkpoint a run resumes from, where newer ones are damaged or the former job still saves."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from grpo_mp.checkpoint.run_state import (
    MANIFEST,
    TrainState,
    checkpoint_folder,
    claim_run_folder,
    complete_checkpoints,
    write_manifest,
)
from grpo_mp.config.load import check_settings, dump_settings
from grpo_mp.config.sections import RunConfig
from grpo_mp.trainer.job import find_whole_checkpoint
from grpo_mp.trainer.save import CheckpointSaver
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import policy_of
from tests.minimal_settings import MINIMAL_SETTINGS
from tools.tiny.models import make_tiny, make_tokenizer

FILES = (
    "policy/common.pt",
    "policy/weights/rank_00000.bin",
    "policy/optimizer/rank_00000.bin",
    "policy/chunks.json",
    MANIFEST,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a tiny model's saved checkpoint; tests leave it as it is."""
    model = tmp_path_factory.mktemp("model") / "model"
    run = tmp_path_factory.mktemp("run")
    make_tiny(model, "qwen2", make_tokenizer(["apples"]), num_hidden_layers=1)
    with policy_of(model, "float32") as policy, CheckpointSaver(RunConfig(folder=run, steps=4), policy, 60.0) as saver:
        saver.save(TrainState(step=4))
    return run


@pytest.fixture
def job(one_rank_group: dist.ProcessGroup) -> SimpleNamespace:
    return SimpleNamespace(rank=0, world_size=1, group=one_rank_group)


def save(run: Path, step: int) -> Path:
    folder = checkpoint_folder(run, step)
    for number, name in enumerate(FILES[:-1]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(Random(step + number).randbytes(2000))
    write_manifest(folder, TrainState(step=step))
    return folder


def newest_first(run: Path) -> list[Path]:
    return complete_checkpoints(run)[::-1]


def cut(file: Path, random: Random) -> None:
    file.write_bytes(file.read_bytes()[: random.randrange(file.stat().st_size)])


def remove(file: Path, random: Random) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [cut, remove])
def test_damage_anywhere_is_noticed_and_the_one_before_is_taken(
    job: SimpleNamespace, saved: Path, tmp_path: Path, damage: Callable[[Path, Random], None]
) -> None:
    """Each time another file, in a newest checkpoint whose other files are links to the saved ones.

    Without its manifest a checkpoint is none.
    """
    random = Random(1)
    source = checkpoint_folder(saved, 4)
    files = sorted(str(file.relative_to(source)) for file in source.rglob("*") if file.is_file())
    assert {MANIFEST, "policy/common.pt", "policy/chunks.json", "policy/optimizer/chunks.json"} <= set(files)
    former = save(tmp_path, 2)
    newest = checkpoint_folder(tmp_path, 4)
    for case, name in enumerate(name for name in files if name != MANIFEST or damage is cut):
        shutil.copytree(source, newest, copy_function=os.link)
        (newest / name).unlink()
        shutil.copyfile(source / name, newest / name)
        if case == 0:
            assert find_whole_checkpoint(newest_first(tmp_path), job) == (newest, [])
        damage(newest / name, random)
        found, notes = find_whole_checkpoint(newest_first(tmp_path), job)
        assert (found, len(notes)) == (former, 1), (case, name)
        assert name in notes[0]
        assert "the run resumes from step_000002; step_000004 is now step_000004.damaged" in notes[0]
        assert newest_first(tmp_path) == [former]
    assert find_whole_checkpoint(newest_first(saved), job) == (source, [])


def test_without_a_whole_one_all_are_left_as_they_are(job: SimpleNamespace, tmp_path: Path) -> None:
    for step in (2, 4):
        cut(save(tmp_path, step) / FILES[1], Random(0))
    with pytest.raises(UserError, match=r"damaged checkpoint, policy/weights/rank_00000\.bin is missing or cut short"):
        find_whole_checkpoint(newest_first(tmp_path), job)
    assert len(newest_first(tmp_path)) == 2
    assert find_whole_checkpoint([], job) == (None, [])


FORMER = """
import sys
from pathlib import Path
from grpo_mp.checkpoint.run_lock import run_lock
from grpo_mp.checkpoint.run_state import prune_checkpoints
from tests.trainer.test_resume import save

run = Path(sys.argv[1])
with run_lock(run):
    print("holds", flush=True)
    sys.stdin.readline()
    save(run, 4)
    prune_checkpoints(run, 1)
"""
NEXT = """
import logging, sys, yaml
from functools import partial
from pathlib import Path
from grpo_mp.checkpoint.run_state import resumable_checkpoints
from grpo_mp.config.load import check_settings, dump_settings
from grpo_mp.distributed.process_groups import single_rank_environment
from grpo_mp.trainer.job import join_run

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")  # for the lock
settings = check_settings(yaml.safe_load(sys.argv[1]), "test")
with single_rank_environment():
    find = partial(resumable_checkpoints, settings.run.folder, "")
    with join_run(settings.run, 60.0, dump_settings(settings), find) as (job, resumed):
        print(resumed.state.step, resumed.damages, flush=True)
"""


def start(script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_checkpoints_are_those_of_the_end_of_the_former_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = check_settings(MINIMAL_SETTINGS | {"run": {**MINIMAL_SETTINGS["run"], "folder": str(run)}}, "test")
    save(run, 2)
    claim_run_folder(run, dump_settings(settings))
    with start(FORMER, str(run)) as former:
        assert former.stdout
        assert former.stdin
        assert former.stdout.readline() == "holds\n"
        with start(NEXT, dump_settings(settings)) as following:
            assert following.stdout
            assert "another job" in following.stdout.readline()
            former.stdin.write("\n")
            former.stdin.flush()
            assert following.stdout.read() == "4 []\n"
    assert (former.returncode, following.returncode) == (0, 0)
