"""Compare what a run writes with what its disk takes, in room and in time, before it starts."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_mp.checkpoint.run_state import CHECKPOINTS, EXPORTS, FINAL, ROLLOUTS, complete_checkpoints
from grpo_mp.policy.parameter_bytes import DiskNeed
from grpo_mp.trainer.replay import FOLDER
from grpo_mp.utils.errors import UserError

PROBE_BYTES, LEAST_PROBE_BYTES = 2**24, 2**20  # that a start writes to see how fast the disk is
SLOW_BYTES_PER_S = 20e6
KEPT = (EXPORTS, FINAL, ROLLOUTS, FOLDER)  # and the checkpoints that are whole


def check_disk(folder: Path, need: DiskNeed, probes: bool = False) -> Iterator[str]:
    """Yield a warning where the disk of a run's folder is too small for all that it keeps; with `probes`, or slow.

    Raises UserError where it is too small for one checkpoint, or takes nothing.
    """
    missing = need.run - _bytes_of(*complete_checkpoints(folder), *(folder / name for name in KEPT))
    place = next(path for path in (folder / CHECKPOINTS, folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    says = f"run.folder: the disk of {place} has {free:,} bytes free"
    if free < min(need.checkpoint, missing):
        damaged = sorted((folder / CHECKPOINTS).glob("*.damaged"))
        unread = f" (no run reads {', '.join(map(str, damaged))}: {_bytes_of(*damaged):,} bytes)" if damaged else ""
        raise UserError(
            f"{says}, and a checkpoint takes {need.checkpoint:,}: make room{unread}, or choose another folder"
        )
    if free < missing:
        lower = "make room, lower run.keep_checkpoints, raise run.export_every, or set rollout.dump=false"
        yield f"{says}, and this run may take {missing:,}: {lower}"
    size = min(PROBE_BYTES, free // 4)
    if probes and size >= LEAST_PROBE_BYTES:
        rate = size / _write_s(place, size)
        if rate < SLOW_BYTES_PER_S:
            yield (
                f"run.folder: the disk of {place} takes {rate / 1e6:.1f} MB/s, so one rank would write a checkpoint of "
                f"{need.checkpoint:,} bytes in {need.checkpoint / rate:,.0f} s: name another run.folder, or raise "
                "run.save_every"
            )


def _bytes_of(*folders: Path) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.glob("**/*") if file.is_file())


def _write_s(folder: Path, size: int) -> float:
    """Return the seconds until so many bytes are on disk, in a file without a name. Raises UserError."""
    start = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"run.folder: the disk of {folder} takes no files ({error.strerror}): choose another"
        ) from error
    return time.perf_counter() - start
