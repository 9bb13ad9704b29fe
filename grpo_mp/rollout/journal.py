"""Journal of generated groups: each rank appends finished and paused groups to one file per step.

A file is a sequence of records. A record has a header (size and XXH3 checksum, 8 bytes each) and two pickles: the
facts by which a group is found, and the group with its scoring statistics. A truncated or corrupted file is read up to
the damage.
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
# Group id, prompt index, prompt epoch. A repeated step may launch other prompts under the same group ids.
GroupKey = tuple[int, int, int]


class Extent(NamedTuple):
    """Sort key of the records of a group: a greater extent is a more complete record."""

    finished: bool
    tokens: int
    kept: bool  # whether a finished group passes the group filter


@dataclass(frozen=True)
class Record:
    """Location of a group in a file, and the facts by which a record is chosen."""

    file: Path
    offset: int
    size: int
    key: GroupKey
    extent: Extent
    episodes: Mapping[int, int] = field(default_factory=dict)  # of an unfinished group: sample index -> tokens
    others: tuple["Record", ...] = ()  # records of the same group with further episodes

    def joined(self, other: "Record") -> "Record":
        """Return the record extended by the episodes of another record of the same unfinished group."""
        episodes = {**other.episodes, **self.episodes}
        if len(episodes) == len(self.episodes):
            return self
        extent = self.extent._replace(tokens=sum(episodes.values()))
        return replace(self, extent=extent, episodes=episodes, others=(*self.others, other, *other.others))


class GroupJournal:
    """Writer that appends a rank's groups to its journal files. Thread-safe."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._lock = threading.Lock()
        self._opened = set[Path]()

    def append(self, step: int, group_id: int, group: EndedGroup, stats: RewardStats, kept: bool) -> bool:
        """Append a group generated in `step`, and the statistics of its scoring, and sync the file to disk.

        `kept`: whether a finished group passes the group filter. Groups without a token are skipped. Returns False,
        with a warning, if writing failed.
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
                self._opened.discard(file)  # so that the next append first cuts a partial record
                LOGGER.warning("%s: group %d is not kept for a restart: %s", file, group_id, one_line(error))
                return False
        return True


def find_paused(folder: Path, steps: Iterable[int], group_id: int, prompt: Prompt) -> PausedGroup | None:
    """Return the most complete record of a prompt's paused group, over `steps` and all ranks; None if there is none."""
    files = [file for step in steps for file in sorted(journal_file(folder, step, 0).parent.glob("*.journal"))]
    records = (_record(file, offset, payload) for file in files for offset, payload in _payloads(file))
    key = group_id, prompt.index, prompt.epoch
    best = best_records(record for record in records if record.key == key and not record.extent.finished)
    loaded = load(best[key], prompt) if best else None
    return loaded[0] if loaded and isinstance(loaded[0], PausedGroup) else None


def journal_file(folder: Path, step: int, rank: int) -> Path:
    """Return the path of a rank's journal file of a step."""
    return folder / f"step_{step:06d}" / f"rank_{rank}.journal"


def prune(folder: Path, last_step: int) -> None:
    """Delete the journals of steps up to `last_step`."""
    for step in folder.glob("step_*"):
        if step.name.removeprefix("step_").isdigit() and int(step.name.removeprefix("step_")) <= last_step:
            shutil.rmtree(step, ignore_errors=True)


def cut_torn_tail(file: Path) -> None:
    """Truncate a file after its last complete record, so that records can be appended."""
    if not file.exists():
        return
    end = max((offset + len(payload) for offset, payload in _payloads(file)), default=0)
    if end < file.stat().st_size:
        with file.open("r+b") as stream:
            stream.truncate(end)


def read_records(file: Path) -> list[Record]:
    """Return the records of a file; at a damaged record, stop with a warning."""
    records = []
    end = 0
    for offset, payload in _payloads(file):
        records.append(_record(file, offset, payload))
        end = offset + len(payload)
    if end < file.stat().st_size:
        LOGGER.warning("%s is cut or damaged after %d groups: the rest is left out", file, len(records))
    return records


def best_records(records: Iterable[Record]) -> dict[GroupKey, Record]:
    """Return the most complete record of each group, joining records with different episodes of the same group."""
    best: dict[GroupKey, Record] = {}
    for record in records:
        other = best.get(record.key)
        if other and other.episodes and record.episodes:
            best[record.key] = other.joined(record)
        elif other is None or record.extent > other.extent:
            best[record.key] = record
    return best


def load(record: Record, prompt: Prompt) -> tuple[EndedGroup, RewardStats] | None:
    """Read the group of a record and the statistics of its scoring; None if its prompt had other tokens."""
    with record.file.open("rb") as stream:
        stream.seek(record.offset)
        content = stream.read(record.size)
    loaded = decode(content, prompt)
    if not (loaded and record.others and isinstance(loaded[0], PausedGroup)):
        return loaded
    # If several records have an episode, the first record takes precedence, as in `joined`.
    parts = [load(replace(other, others=()), prompt) for other in reversed(record.others)]
    groups = [part[0] for part in parts if part] + [loaded[0]]
    samples = {sample.index: sample for group in groups for sample in group.samples}
    return replace(loaded[0], samples=tuple(sample for _, sample in sorted(samples.items()))), loaded[1]


def encode(group_id: int, group: EndedGroup, stats: RewardStats, kept: bool) -> bytes:
    """Return the payload of a group's record, two pickles; b"" if the group has no token."""
    finished = isinstance(group, SampleGroup)
    prompt = group.prompt
    outputs = group.outputs if isinstance(group, PausedGroup) else ()
    samples = tuple(map(_plain, group.samples))
    tokens_of = {one.index: sum(len(part.tokens) for part in one.sequences) for one in samples}
    tokens = sum(tokens_of.values()) + sum(len(output.tokens) for output in outputs)
    if not tokens:
        return b""
    key = (group_id, prompt.index, prompt.epoch)
    extent = Extent(finished, tokens, finished and kept)
    episodes = {} if finished or outputs else tokens_of
    without_columns = replace(prompt, columns={}, messages=())  # can be read from the data again
    ended: EndedGroup = replace(group, prompt=without_columns, samples=samples)
    return pickle.dumps((key, tuple(extent), episodes)) + pickle.dumps((ended, stats))


def decode(payload: bytes, prompt: Prompt) -> tuple[EndedGroup, RewardStats] | None:
    """Return the group of a payload, with `prompt` as its prompt, and its statistics; None if the tokens differ."""
    stream = io.BytesIO(payload)
    pickle.load(stream)  # the facts
    group, stats = pickle.load(stream)
    return (replace(group, prompt=prompt), stats) if group.prompt.tokens == prompt.tokens else None


def _plain(sample: Sample) -> Sample:
    return replace(
        sample,
        messages=tuple(json.loads(as_json(sample.messages))),
        extra=json.loads(as_json(sample.extra)),
        earlier=tuple(map(_plain, sample.earlier)),
    )


def _payloads(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and payload of each record; stop at a truncated or damaged record."""
    end = file.stat().st_size
    with file.open("rb") as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            size, checksum = HEADER.unpack(header)
            offset = stream.tell()
            # A size of 0 is damage: a host that crashes may leave zeros at the end of a file.
            if not 0 < size <= end - offset or _checksum(payload := stream.read(size)) != checksum:
                return
            yield offset, payload


def _checksum(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def _record(file: Path, offset: int, payload: bytes) -> Record:
    key, extent, episodes = pickle.loads(payload)  # the first of the two pickles
    return Record(file, offset, len(payload), key, Extent(*extent), episodes)
