"""A folder in the making: part by part, with checksums, so that a second start goes on where the first stopped.

It stands beside its final name as NAME.incomplete and is renamed when it is whole.
"""

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from grpo_mp.checkpoint.manifest import (
    JOINT,
    RECORD,
    RECORDS,
    checksums,
    checksums_of,
    is_there,
    read_json,
    record_of,
    write_json,
)
from grpo_mp.checkpoint.worker_group import WorkerGroup
from grpo_mp.errors import UserError

PART_BYTES = 2**29
MAX_PENDING_WRITES = 2  # parts on their way to the disk
NUM_READERS = 2  # parameters of one part that are read and cast at a time
Made = TypeVar("Made")
Finish = Callable[[Path], Sequence[str]]
Watch = Callable[[int, int], None]  # bytes just written, bytes to write in all by this start


@dataclass(frozen=True)
class Part:
    """What is written at once: `bytes` of the parameters in `params`, as the file or folder `name`."""

    name: str
    params: tuple[str, ...]
    bytes: int


def check_apart(source: Path, final: Path) -> None:
    """Raise UserError where a conversion would write over its own source."""
    if final.resolve() == source.resolve():
        raise UserError(f"{final} is the source of this conversion, too: choose another destination")


def divide(sizes: Mapping[str, int], limit: int) -> list[tuple[tuple[str, ...], int]]:
    """Names and their bytes -> runs of names, in order, of at most `limit` bytes or one name, with their bytes."""
    runs: list[tuple[list[str], int]] = []
    for name, size in sizes.items():
        if not runs or runs[-1][1] + size > limit:
            runs.append(([], 0))
        names, held = runs[-1]
        runs[-1] = ([*names, name], held + size)
    return [(tuple(names), held) for names, held in runs]


def fingerprint(files: Iterable[Path], *what: object) -> str:
    """Of files by name, size and time of change, and of what is made of them."""
    stats = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.sha256(json.dumps([stats, [str(each) for each in what]]).encode()).hexdigest()


def build(
    final: Path,
    source: str,
    parts: Sequence[Part],
    make: Callable[[Part], Made],
    write: Callable[[Path, Made], None],
    finish: Finish,
    watch: Watch,
    team: WorkerGroup | None = None,
) -> None:
    """Make and write the parts that are not there yet, then `finish`, then rename; nothing where `final` is there.

    `write` gets the path of its part, `finish` the incomplete folder; it returns which files it made need checksums.
    Up to three parts are in memory. The ranks of a
    `team` divide the parts by bytes; the first finishes and watches. Raises UserError where `final` or its beginning
    are of another source, and where the disk is too small.
    """
    team = team or WorkerGroup()
    folder = final.with_name(final.name + ".incomplete")
    names = team.agree(lambda: _prepare(final, folder, source, parts))
    if names is None:
        return
    missing = [part for part in parts if part.name in names]
    total, seen = sum(part.bytes for part in missing), 0
    for done in _written(folder, share(missing, team.rank, team.size), make, write, team):
        if team.rank == 0 and done > seen:
            watch(done - seen, total)
            seen = done
    if team.rank == 0:
        for done in team.until(total):
            watch(done - seen, total)
            seen = done
        _publish(folder, final, source, parts, finish)


def each_in_threads(make: Callable[[str], Made], names: Sequence[str]) -> Iterator[Made]:
    """What `make` returns for each name, in order; some are made at a time."""
    with ThreadPoolExecutor(NUM_READERS) as makers:
        yield from makers.map(make, names)


def share(parts: Sequence[Part], rank: int, size: int) -> list[Part]:
    """A rank's run of the parts: those that begin in its share of the bytes."""
    total = max(sum(part.bytes for part in parts), 1)
    begins = accumulate((part.bytes for part in parts), initial=0)
    return [part for part, begin in zip(parts, begins, strict=False) if min(begin * size // total, size - 1) == rank]


def _prepare(final: Path, folder: Path, source: str, parts: Sequence[Part]) -> list[str] | None:
    """Names of the parts that are still to be written, in a folder made for them; None where all is done."""
    if final.exists():
        _check_same(final, source, "holds something else: choose another destination")
        shutil.rmtree(final / RECORDS, ignore_errors=True)  # where an earlier start was killed at the very end
        return None
    done: set[str] = set()
    if folder.exists():
        _check_same(folder, source, "is of another conversion, or of none: choose another destination")
        done = {part.name for part in parts if is_there(folder, part.name)}
        _sweep(folder, done | {RECORD, RECORDS})
    missing = [part for part in parts if part.name not in done]
    _check_disk(folder, sum(part.bytes for part in missing))
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, {"source": source})
    return [part.name for part in missing]


def _written(
    folder: Path,
    parts: Iterable[Part],
    make: Callable[[Part], Made],
    write: Callable[[Path, Made], None],
    team: WorkerGroup,
) -> Iterator[int]:
    """Yields the bytes that all ranks have written. One part is made while another is written and a third is synced."""
    with ThreadPoolExecutor(MAX_PENDING_WRITES) as behind:
        flying: deque[Future[int]] = deque()
        for part in parts:
            made = make(part)
            if len(flying) == MAX_PENDING_WRITES:
                yield team.count(flying.popleft().result())
            flying.append(behind.submit(_put, folder, part, write, made))
            del made
        for last in flying:
            yield team.count(last.result())


def _put(folder: Path, part: Part, write: Callable[[Path, Made], None], made: Made) -> int:
    _remove(folder / part.name)
    write(folder / part.name, made)
    write_json(record_of(folder, part.name), checksums(folder, part.name))
    return part.bytes


def _publish(folder: Path, final: Path, source: str, parts: Sequence[Part], finish: Finish) -> None:
    joint = finish(folder)
    records = {part.name: read_json(record_of(folder, part.name)) for part in parts}
    sums = checksums_of(folder, [folder / name for name in joint])
    write_json(folder / RECORD, {"source": source, "parts": records, JOINT: sums})
    folder.rename(final)
    shutil.rmtree(final / RECORDS)


def _check_same(folder: Path, source: str, otherwise: str) -> None:
    if read_json(folder / RECORD).get("source") != source:
        raise UserError(f"{folder} {otherwise}")


def _check_disk(folder: Path, needed: int) -> None:
    existing = next(path for path in folder.absolute().parents if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(f"{existing}: the disk has {free:,} bytes free and {needed:,} are needed: make room first")


def _sweep(folder: Path, keep: set[str]) -> None:
    """Remove what an earlier start left half-written: under the names of parts, or of libraries' temporary files."""
    for path in folder.iterdir():
        if path.name not in keep:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
