"""Journal of generated groups: each rank appends finished and paused groups to one file per step.

A file is a sequence of records: size and checksum (XXH3, 8 bytes each), then two pickles: the facts by which a group is
found, and the group with its scoring statistics. A file that was cut, or has a flipped bit, is read up to there.
"""

import io
import json
import logging
import os
import pickle
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import xxhash

from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.groups import EndedGroup, PausedGroup
from grpo_mp.utils.errors import one_line
from grpo_mp.utils.files import as_json
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

LOGGER = logging.getLogger(__name__)
HEADER = struct.Struct("<QQ")
GroupKey = tuple[int, int, int]  # id; index and epoch of its prompt, which differ where a repeated step launched others


class Extent(NamedTuple):
    """Sort key: prefer the more complete record."""

    finished: bool
    tokens: int
    kept: bool  # a finished one passes the group filter


@dataclass(frozen=True)
class Record:
    """Place of a group in a file, and the facts by which it is chosen."""

    file: Path
    offset: int
    size: int
    key: GroupKey
    extent: Extent
    episodes: Mapping[int, int] = field(default_factory=dict)  # of an unfinished group: tokens by index in the group
    others: tuple["Record", ...] = ()  # of the same group, with other episodes

    def joined(self, other: "Record") -> "Record":
        """Return the record with the episodes of another; both are of an unfinished group."""
        episodes = {**other.episodes, **self.episodes}
        if len(episodes) == len(self.episodes):
            return self
        extent = self.extent._replace(tokens=sum(episodes.values()))
        return replace(self, extent=extent, episodes=episodes, others=(*self.others, other, *other.others))


class GroupJournal:
    """Appends a rank's groups to its files. Thread-safe."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._lock = folder, rank, threading.Lock()
        self._opened = set[Path]()

    def append(self, step: int, group_id: int, group: EndedGroup, stats: RewardStats, kept: bool) -> bool:
        """Append a group generated in `step` and the statistics of its scoring; groups without a token are left out.

        `kept`: whether a finished group passes the group filter. On return the record is on disk. Returns False, with
        a warning, where the disk refused it.
        """
        payload = encode(group_id, group, stats, kept)
        if not payload:
            return True
        file = journal_file(self._folder, step, self._rank)
        with self._lock:
            try:
                if file not in self._opened:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    cut_torn_tail(file)
                    self._opened.add(file)
                with file.open("ab") as stream:
                    stream.write(HEADER.pack(len(payload), _checksum(payload)) + payload)
                    stream.flush()
                    os.fsync(stream.fileno())
            except OSError as error:
                self._opened.discard(file)  # a partial record is cut before the next one
                LOGGER.warning("%s: group %d is not kept for a restart: %s", file, group_id, one_line(error))
                return False
        return True


def find_paused(folder: Path, steps: Iterable[int], group_id: int, prompt: Prompt) -> PausedGroup | None:
    """Return the most complete record of a paused group of this prompt in these steps, of any rank; None without."""
    files = [file for step in steps for file in sorted(journal_file(folder, step, 0).parent.glob("*.journal"))]
    records = (_record(file, offset, payload) for file in files for offset, payload in _payloads(file))
    key = group_id, prompt.index, prompt.epoch
    best = best_records(record for record in records if record.key == key and not record.extent.finished)
    loaded = load(best[key], prompt) if best else None
    return loaded[0] if loaded and isinstance(loaded[0], PausedGroup) else None


def journal_file(folder: Path, step: int, rank: int) -> Path:
    """Return the file to which a rank appends in a step."""
    return folder / f"step_{step:06d}" / f"rank_{rank}.journal"


def prune(folder: Path, last_step: int) -> None:
    """Remove what was generated for steps up to `last_step`."""
    for step in folder.glob("step_*"):
        if step.name.removeprefix("step_").isdigit() and int(step.name.removeprefix("step_")) <= last_step:
            shutil.rmtree(step, ignore_errors=True)


def cut_torn_tail(file: Path) -> None:
    """Cut a file after its last whole record, so that more can be appended."""
    if not file.exists():
        return
    end = max((offset + len(payload) for offset, payload in _payloads(file)), default=0)
    if end < file.stat().st_size:
        with file.open("r+b") as stream:
            stream.truncate(end)


def read_records(file: Path) -> list[Record]:
    """Return the records of a file up to a damaged one, which is logged."""
    records, end = [], 0
    for offset, payload in _payloads(file):
        records.append(_record(file, offset, payload))
        end = offset + len(payload)
    if end < file.stat().st_size:
        LOGGER.warning("%s is cut or damaged after %d groups: the rest is left out", file, len(records))
    return records


def best_records(records: Iterable[Record]) -> dict[GroupKey, Record]:
    """Return the most complete record of each group; records of its episodes are joined."""
    best: dict[GroupKey, Record] = {}
    for record in records:
        other = best.get(record.key)
        if other and other.episodes and record.episodes:
            best[record.key] = other.joined(record)
        elif other is None or record.extent > other.extent:
            best[record.key] = record
    return best


def load(record: Record, prompt: Prompt) -> tuple[EndedGroup, RewardStats] | None:
    """Read a group of this prompt and the statistics of its scoring; None where its prompt had other tokens."""
    with record.file.open("rb") as stream:
        stream.seek(record.offset)
        content = stream.read(record.size)
    loaded = decode(content, prompt)
    if not (loaded and record.others and isinstance(loaded[0], PausedGroup)):
        return loaded
    # Of an episode that several have, the first one's stays, as in `joined`.
    parts = [load(replace(other, others=()), prompt) for other in reversed(record.others)]
    groups = [part[0] for part in parts if part] + [loaded[0]]
    samples = {sample.index: sample for group in groups for sample in group.samples}
    return replace(loaded[0], samples=tuple(sample for _, sample in sorted(samples.items()))), loaded[1]


def encode(group_id: int, group: EndedGroup, stats: RewardStats, kept: bool) -> bytes:
    """Return the payload of a group's record; b"" where the group has no token."""
    finished, prompt = isinstance(group, SampleGroup), group.prompt
    outputs = group.outputs if isinstance(group, PausedGroup) else ()
    samples = tuple(map(_plain, group.samples))
    tokens_of = {one.index: sum(len(part.tokens) for part in one.sequences) for one in samples}
    tokens = sum(tokens_of.values()) + sum(len(output.tokens) for output in outputs)
    if not tokens:
        return b""
    key, extent = (group_id, prompt.index, prompt.epoch), Extent(finished, tokens, finished and kept)
    episodes = {} if finished or outputs else tokens_of
    without_columns = replace(prompt, columns={}, messages=())  # the data has them
    ended: EndedGroup = replace(group, prompt=without_columns, samples=samples)
    return pickle.dumps((key, tuple(extent), episodes)) + pickle.dumps((ended, stats))


def decode(payload: bytes, prompt: Prompt) -> tuple[EndedGroup, RewardStats] | None:
    """Return the group of a payload, as a group of this prompt; None where its prompt had other tokens."""
    stream = io.BytesIO(payload)
    pickle.load(stream)  # the facts
    group, stats = pickle.load(stream)
    return (replace(group, prompt=prompt), stats) if group.prompt.tokens == prompt.tokens else None


def _plain(sample: Sample) -> Sample:
    return replace(
        sample,
        messages=tuple(json.loads(as_json(sample.messages))),
        extra=json.loads(as_json(sample.extra)),
    )


def _payloads(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and content of each record up to a cut or damaged one."""
    end = file.stat().st_size
    with file.open("rb") as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            size, checksum = HEADER.unpack(header)
            offset = stream.tell()
            # No record is empty; a host that goes down may leave zeros.
            if not 0 < size <= end - offset or _checksum(payload := stream.read(size)) != checksum:
                return
            yield offset, payload


def _checksum(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def _record(file: Path, offset: int, payload: bytes) -> Record:
    key, extent, episodes = pickle.loads(payload)  # the first of the two pickles
    return Record(file, offset, len(payload), key, Extent(*extent), episodes)
