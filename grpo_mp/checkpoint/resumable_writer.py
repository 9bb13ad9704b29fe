"""Write a folder in parts, so that a second start resumes where the first stopped.

The folder is NAME.incomplete until all parts are there. A part gets its own name once it is on disk, so a name is
proof of a complete part, and a start that was killed repeats no more than the parts it was writing.
"""

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, rendezvous

from grpo_mp.distributed.rendezvous import is_first_failure
from grpo_mp.utils.errors import PhaseTimeout, UserError
from grpo_mp.utils.files import read_json, sync_to_disk, write_json

CONVERSION_RECORD = "conversion.json"  # fingerprint of the source, and its folder
SOURCE_FOLDER = "source_folder"  # key of the record: path of the Hugging Face folder that was converted
TIMEOUT_S = 1800.0  # without a byte from any rank
POLL_S = 0.1
PART_BYTES = 2**29
UNFINISHED = "unfinished_"  # prefix of a part that is being written
MAX_PENDING_WRITES = 2
NUM_READERS = 2  # threads that read and cast the parameters of one part

Content = TypeVar("Content")
ProgressCallback = Callable[[int, int], None]  # bytes just written, bytes that this start writes in all


class WorkerGroup:
    """The processes that write one folder together: this one alone, or the ranks of a launched job.

    They share only the job's store, not a process group, so a rank that fails leaves no other in a collective.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        """Several ranks need the job's `store`."""
        self.rank, self.size, self._store, self._bytes = rank, size, store, 0

    @classmethod
    def of_job(cls) -> "WorkerGroup":
        """Join the group that the launcher's environment names; a single process without a launcher."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls()
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
        return cls(rank, size, PrefixStore("convert", store))

    def broadcast(self, compute: Callable[[], Any]) -> Any:
        """Return on every rank what `compute` returns on rank 0, as JSON. May be called once."""
        if self._store is None:
            return compute()
        if self.rank == 0:
            value = compute()
            self._store.set("broadcast", json.dumps(value))
            return value
        return json.loads(self._store.get("broadcast"))

    def add_bytes(self, size: int) -> int:
        """Add to the bytes that all ranks have written; return their sum."""
        self._bytes = self._store.add("bytes", size) if self._store else self._bytes + size
        return self._bytes

    def wait_until(self, total: int) -> Iterator[int]:
        """Wait until all ranks have written `total` bytes; yield each new sum. Raises PhaseTimeout after a pause."""
        written, since = self._bytes, time.monotonic()
        while written < total:
            time.sleep(POLL_S)
            if (now := self.add_bytes(0)) > written:
                written, since = now, time.monotonic()
                yield now
            elif time.monotonic() - since > TIMEOUT_S:
                raise PhaseTimeout(f"the other ranks wrote nothing for {TIMEOUT_S:.0f} s: start again to resume")

    def is_first_failure(self) -> bool:
        """Return whether this rank is the first to ask, and so the one that prints the error."""
        return self._store is None or is_first_failure(self._store, "reporters")


@dataclass(frozen=True)
class Part:
    """A file or folder `name` that holds the parameters `params`, `bytes` in all."""

    name: str
    params: tuple[str, ...]
    bytes: int


def check_destination(source: Path, destination: Path) -> None:
    """Refuse to convert a folder onto itself."""
    if destination.resolve() == source.resolve():
        raise UserError(f"{destination} is the source of this conversion, too: choose another destination")


def fingerprint(files: Iterable[Path], *options: object) -> str:
    """Hash names, sizes and modification times of the source files, and the options of a conversion."""
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.sha256(json.dumps([stats, [str(option) for option in options]]).encode()).hexdigest()


def write_parts(
    destination: Path,
    record: dict[str, str],
    parts: Sequence[Part],
    load: Callable[[Part], Content],
    save: Callable[[Path, Content], None],
    finish: Callable[[Path], None],
    report_progress: ProgressCallback,
    workers: WorkerGroup | None = None,
) -> None:
    """Load and save the missing parts, call `finish` with the incomplete folder, and rename the folder.

    `record` identifies the conversion by its `source`; a destination with another record is refused. The workers divide
    the parts by bytes; rank 0 finishes and reports progress. At most three parts are in memory.
    """
    workers = workers or WorkerGroup()
    folder = destination.with_name(destination.name + ".incomplete")
    names = workers.broadcast(lambda: _prepare(destination, folder, record, parts))
    if names is None:
        return
    missing = [part for part in parts if part.name in names]
    own = parts_of_rank(missing, workers.rank, workers.size)
    total, reported = sum(part.bytes for part in missing), 0
    remote_progress = workers.wait_until(total) if workers.rank == 0 else ()
    for written in chain(_write_missing(folder, own, load=load, save=save, workers=workers), remote_progress):
        if workers.rank == 0 and written > reported:
            report_progress(written - reported, total)
            reported = written
    if workers.rank:
        return
    finish(folder)
    for file in folder.iterdir():
        sync_to_disk(file)
    folder.rename(destination)


def map_in_threads(load: Callable[[str], Content], names: Sequence[str]) -> Iterator[Content]:
    """Yield `load(name)` for each name, in order; `NUM_READERS` run at a time."""
    with ThreadPoolExecutor(NUM_READERS) as executor:
        yield from executor.map(load, names)


def parts_of_rank(parts: Sequence[Part], rank: int, size: int) -> list[Part]:
    """Return a rank's contiguous parts: those that begin in its share of the bytes."""
    total = max(sum(part.bytes for part in parts), 1)
    starts = accumulate((part.bytes for part in parts), initial=0)
    return [part for part, start in zip(parts, starts, strict=False) if min(start * size // total, size - 1) == rank]


def _prepare(destination: Path, folder: Path, record: dict[str, str], parts: Sequence[Part]) -> list[str] | None:
    """Make or clean the incomplete folder. Return the names of the missing parts; None if `destination` is complete."""
    if destination.exists():
        _check_source(destination, record, "holds something else: choose another destination")
        return None
    complete: set[str] = set()
    if folder.exists():
        _check_source(folder, record, "is of another conversion, or of none: choose another destination")
        complete = {part.name for part in parts if (folder / part.name).exists()}
        for path in folder.iterdir():  # unfinished parts, and temporary files of libraries
            if path.name not in complete | {CONVERSION_RECORD}:
                _remove(path)
    missing = [part for part in parts if part.name not in complete]
    needed = sum(part.bytes for part in missing)
    disk = next(path for path in folder.absolute().parents if path.exists())
    if (free := shutil.disk_usage(disk).free) < needed:
        raise UserError(f"{disk}: the disk has {free:,} bytes free and {needed:,} are needed: make room first")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONVERSION_RECORD, record)
    return [part.name for part in missing]


def _write_missing(
    folder: Path,
    parts: Iterable[Part],
    load: Callable[[Part], Content],
    save: Callable[[Path, Content], None],
    workers: WorkerGroup,
) -> Iterator[int]:
    """Yield the bytes written by all ranks. One part is loaded while another is saved and a third is synced."""

    def write(part: Part, content: Content) -> int:
        unfinished = folder / f"{UNFINISHED}{part.name}"
        save(unfinished, content)
        for path in (*unfinished.rglob("*"), unfinished):
            sync_to_disk(path)
        unfinished.rename(folder / part.name)
        return part.bytes

    with ThreadPoolExecutor(MAX_PENDING_WRITES) as executor:
        pending: deque[Future[int]] = deque()
        for part in parts:
            content = load(part)
            if len(pending) == MAX_PENDING_WRITES:
                yield workers.add_bytes(pending.popleft().result())
            pending.append(executor.submit(write, part, content))
            del content
        for future in pending:
            yield workers.add_bytes(future.result())


def _check_source(folder: Path, record: dict[str, str], message: str) -> None:
    if read_json(folder / CONVERSION_RECORD).get("source") != record["source"]:
        raise UserError(f"{folder} {message}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
