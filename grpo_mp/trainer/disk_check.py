"""Compare what a run writes with the room that its disk has, before it starts."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo_mp.checkpoint.run_state import CHECKPOINTS, EXPORTS, FINAL, ROLLOUTS
from grpo_mp.errors import UserError
from grpo_mp.policy.parameter_bytes import DiskNeed
from grpo_mp.trainer.replay import FOLDER

KEPT = (CHECKPOINTS, EXPORTS, FINAL, ROLLOUTS, FOLDER)


def check_disk(folder: Path, need: DiskNeed) -> Iterator[str]:
    """Yield a warning where the disk of a run's folder is too small for all that it keeps.

    Raises UserError where it is too small for one checkpoint.
    """
    kept = [file for name in KEPT for file in (folder / name).glob("**/*")]
    missing = need.run - sum(file.stat().st_size for file in kept if file.is_file())
    place = next(path for path in (folder / CHECKPOINTS, folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    says = f"run.folder: the disk of {place} has {free:,} bytes free"
    if free < min(need.checkpoint, missing):
        raise UserError(f"{says}, and a checkpoint takes {need.checkpoint:,}: make room, or choose another folder")
    if free < missing:
        lower = "make room, lower run.keep_checkpoints, raise run.export_every, or set rollout.dump=false"
        yield f"{says}, and this run may take {missing:,}: {lower}"
