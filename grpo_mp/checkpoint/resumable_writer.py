"""Write a folder part by part, with checksums, so that a second start resumes where the first stopped.

It is written beside its final name as NAME.incomplete and renamed when it is complete.
"""

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, rendezvous

from grpo_mp.checkpoint.manifest import CONVERSION_RECORD, SHARED_FILES, SOURCE_FOLDER, checksums
from grpo_mp.distributed.rendezvous import is_first_failure
from grpo_mp.utils.errors import PhaseTimeout, UserError
from grpo_mp.utils.files import read_json, write_json

TIMEOUT_S = 1800.0  # without a byte from any rank
POLL_S = 0.1
PART_BYTES = 2**29
PART_RECORDS = "conversion"  # folder in an incomplete conversion: a record of each part
MAX_PENDING_WRITES = 2  # parts on their way to the disk
NUM_READERS = 2  # parameters of one part that are read and cast at a time


class WorkerGroup:
    """The processes that write one folder together, as this one sees them: one, or the ranks of a launched job.

    They share no process group, only the job's store, so a rank that fails leaves no other in a collective.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        """Take this rank and the number of ranks; more than one need the job's `store`."""
        self.rank, self.size, self._store, self._bytes = rank, size, store, 0

    @classmethod
    def of_job(cls) -> "WorkerGroup":
        """Join the group that the launcher's environment names; one process where no launcher started it."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls()
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
        return cls(rank, size, PrefixStore("convert", store))

    def broadcast(self, compute: Callable[[], Any]) -> Any:
        """Return on every rank what `compute` returns on the first, which must fit into JSON. May be called once."""
        if self._store is None:
            return compute()
        if self.rank == 0:
            value = compute()
            self._store.set("broadcast", json.dumps(value))
            return value
        return json.loads(self._store.get("broadcast"))

    def add_bytes(self, size: int) -> int:
        """Add to the bytes written by all ranks; return their sum."""
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
                raise PhaseTimeout(
                    f"the other ranks wrote nothing for {TIMEOUT_S:.0f} s: start again, what is written stays"
                )

    def is_first_failure(self) -> bool:
        """Return whether this rank is the first to ask, and so the one that prints the error."""
        return self._store is None or is_first_failure(self._store, "reporters")


Content = TypeVar("Content")
ProgressCallback = Callable[[int, int], None]  # bytes just written, bytes to write in all by this start


@dataclass(frozen=True)
class Part:
    """What is written at once: the parameters `params`, of `bytes` in all, as the file or folder `name`."""

    name: str
    params: tuple[str, ...]
    bytes: int


def check_destination(source: Path, destination: Path) -> None:
    """Raise UserError where a conversion would write over its own source."""
    if destination.resolve() == source.resolve():
        raise UserError(f"{destination} is the source of this conversion, too: choose another destination")


def fingerprint(files: Iterable[Path], *options: object) -> str:
    """Hash name, size and modification time of a conversion's source files, and its options."""
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.sha256(json.dumps([stats, [str(option) for option in options]]).encode()).hexdigest()


def write_parts(
    destination: Path,
    source: str,
    parts: Sequence[Part],
    load: Callable[[Part], Content],
    save: Callable[[Path, Content], None],
    finish: Callable[[Path], Sequence[str]],
    report_progress: ProgressCallback,
    workers: WorkerGroup | None = None,
    source_folder: Path | None = None,
) -> None:
    """Load and save the parts that are missing, then `finish`, then rename.

    Where `destination` exists it only notes `source_folder`, which the record names, if it is given. `source` is a
    fingerprint. `save` gets the path of its part, `finish` the incomplete folder; it returns which files
    it wrote need checksums. Up to three parts are in memory. The workers divide the parts by bytes; the first one
    finishes and reports progress. Raises UserError where `destination` or its incomplete folder are of another source,
    and where the disk is too small.
    """
    workers = workers or WorkerGroup()
    folder = destination.with_name(destination.name + ".incomplete")
    names = workers.broadcast(lambda: _prepare(destination, folder, source, parts))
    origin = {SOURCE_FOLDER: str(source_folder.absolute())} if source_folder else {}
    if names is None:
        record = read_json(destination / CONVERSION_RECORD)
        noted = record.get(SOURCE_FOLDER)
        if workers.rank == 0 and origin and not (noted and Path(noted).exists()):  # an older version, or it has moved
            with suppress(OSError):  # adapters alone need it
                write_json(destination / CONVERSION_RECORD, record | origin)
        return
    missing = [part for part in parts if part.name in names]
    own = parts_of_rank(missing, workers.rank, workers.size)
    total, reported = sum(part.bytes for part in missing), 0
    remote_progress = workers.wait_until(total) if workers.rank == 0 else ()
    for written in chain(_write_missing(folder, own, load, save, workers), remote_progress):
        if workers.rank == 0 and written > reported:
            report_progress(written - reported, total)
            reported = written
    if workers.rank:
        return
    shared = checksums(folder, [folder / name for name in finish(folder)])
    records = {part.name: read_json(_record_file(folder, part)) for part in parts}
    write_json(folder / CONVERSION_RECORD, {"source": source, **origin, "parts": records, SHARED_FILES: shared})
    folder.rename(destination)
    shutil.rmtree(destination / PART_RECORDS)


def map_in_threads(load: Callable[[str], Content], names: Sequence[str]) -> Iterator[Content]:
    """Yield what `load` returns for each name, in order; `NUM_READERS` run at a time."""
    with ThreadPoolExecutor(NUM_READERS) as executor:
        yield from executor.map(load, names)


def parts_of_rank(parts: Sequence[Part], rank: int, size: int) -> list[Part]:
    """Return a rank's contiguous parts: those that begin in its share of the bytes."""
    total = max(sum(part.bytes for part in parts), 1)
    starts = accumulate((part.bytes for part in parts), initial=0)
    return [part for part, start in zip(parts, starts, strict=False) if min(start * size // total, size - 1) == rank]


def _prepare(destination: Path, folder: Path, source: str, parts: Sequence[Part]) -> list[str] | None:
    """Create or clean the incomplete folder. Return the names of the parts to write; None where all is done."""
    if destination.exists():
        _check_source(destination, source, "holds something else: choose another destination")
        shutil.rmtree(destination / PART_RECORDS, ignore_errors=True)  # an earlier start was killed at the very end
        return None
    complete: set[str] = set()
    if folder.exists():
        _check_source(folder, source, "is of another conversion, or of none: choose another destination")
        for part in parts:
            record = read_json(_record_file(folder, part))
            if record and _part_checksums(folder, part) == record:
                complete.add(part.name)
        for path in folder.iterdir():  # half-written parts, and temporary files of libraries
            if path.name not in complete | {CONVERSION_RECORD, PART_RECORDS}:
                _remove(path)
    missing = [part for part in parts if part.name not in complete]
    needed = sum(part.bytes for part in missing)
    disk = next(path for path in folder.absolute().parents if path.exists())
    if (free := shutil.disk_usage(disk).free) < needed:
        raise UserError(f"{disk}: the disk has {free:,} bytes free and {needed:,} are needed: make room first")
    (folder / PART_RECORDS).mkdir(parents=True, exist_ok=True)
    write_json(folder / CONVERSION_RECORD, {"source": source})
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
        _remove(folder / part.name)
        save(folder / part.name, content)
        write_json(_record_file(folder, part), _part_checksums(folder, part))
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


def _record_file(folder: Path, part: Part) -> Path:
    return folder / PART_RECORDS / f"{part.name}.json"


def _part_checksums(folder: Path, part: Part) -> dict[str, dict[str, Any]]:
    path = folder / part.name
    return checksums(folder, sorted(path.rglob("*")) if path.is_dir() else [path])


def _check_source(folder: Path, source: str, message: str) -> None:
    if read_json(folder / CONVERSION_RECORD).get("source") != source:
        raise UserError(f"{folder} {message}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
