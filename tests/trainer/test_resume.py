"""Which checkpoint a run resumes from, where newer ones are damaged."""

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
    complete_checkpoints,
    own_checksums,
    write_manifest,
)
from grpo_mp.errors import UserError
from grpo_mp.trainer.resume import find_whole_checkpoint

CASES = 50
FILES = (
    "policy/common.pt",
    "policy/weights/__0_0.distcp",
    "policy/optimizer/__0_0.distcp",
    "policy/.metadata",
    MANIFEST,
)


@pytest.fixture
def job(one_rank_group: dist.ProcessGroup) -> SimpleNamespace:
    return SimpleNamespace(rank=0, world_size=1, group=one_rank_group)


def save(run: Path, step: int) -> Path:
    folder = checkpoint_folder(run, step)
    for number, name in enumerate(FILES[:-1]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(Random(step + number).randbytes(2000))
    write_manifest(folder, TrainState(step=step), own_checksums(folder, 0, 1))
    return folder


def newest_first(run: Path) -> list[Path]:
    return complete_checkpoints(run)[::-1]


def cut(file: Path, random: Random) -> None:
    file.write_bytes(file.read_bytes()[: random.randrange(file.stat().st_size)])


def flip(file: Path, random: Random) -> None:
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def remove(file: Path, random: Random) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [cut, flip, remove])
def test_damage_anywhere_is_noticed_and_the_one_before_is_taken(
    job: SimpleNamespace, tmp_path: Path, damage: Callable[[Path, Random], None]
) -> None:
    """Without its manifest a checkpoint is none."""
    random = Random(0)
    for case in range(CASES):
        run = tmp_path / str(case)
        former, newest = save(run, 2), save(run, 4)
        name = random.choice(FILES[:-1] if damage is remove else FILES)
        damage(newest / name, random)
        found, notes = find_whole_checkpoint(newest_first(run), job)
        assert (found, len(notes)) == (former, 1), (case, name)
        assert name in notes[0]
        assert "the run resumes from step_000002; step_000004 is now step_000004.damaged" in notes[0]
        assert newest_first(run) == [former]


def test_without_a_whole_one_all_are_left_as_they_are(job: SimpleNamespace, tmp_path: Path) -> None:
    for step in (2, 4):
        cut(save(tmp_path, step) / FILES[1], Random(0))
    with pytest.raises(UserError, match=r"step_000004/policy/weights/__0_0\.distcp is missing or cut short"):
        find_whole_checkpoint(newest_first(tmp_path), job)
    assert len(newest_first(tmp_path)) == 2
    assert find_whole_checkpoint([], job) == (None, [])
