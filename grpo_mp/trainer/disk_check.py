"""Compare the estimated size of a run's files with the free disk space, before the run starts."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo_mp.checkpoint.run_state import CHECKPOINTS, EXPORTS, FINAL, ROLLOUTS, complete_checkpoints
from grpo_mp.policy.parameter_bytes import DiskNeed
from grpo_mp.trainer.replay import FOLDER
from grpo_mp.utils.errors import UserError

KEPT = (EXPORTS, FINAL, ROLLOUTS, FOLDER)  # folders that a run keeps besides its checkpoints


def check_disk(folder: Path, need: DiskNeed) -> Iterator[str]:
    """Yield a warning if the disk cannot hold all files of the run; raise UserError if it cannot hold a checkpoint."""
    missing = need.run - _bytes_of(*complete_checkpoints(folder), *(folder / name for name in KEPT))
    place = next(path for path in (folder / CHECKPOINTS, folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"run.folder: the disk of {place} has {free:,} bytes free"
    if free < min(need.checkpoint, missing):
        raise UserError(f"{found}, and a checkpoint takes {need.checkpoint:,}: make room, or choose another folder")
    if free < missing:
        lower = "make room, lower run.keep_checkpoints, raise run.export_every, or set rollout.dump=false"
        yield f"{found}, and this run may take {missing:,}: {lower}"


def _bytes_of(*folders: Path) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.glob("**/*") if file.is_file())
