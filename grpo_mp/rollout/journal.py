"""What engines generate, on disk as it comes: a file a rank and step, to which finished and paused groups are appended.

A file is a sequence of records: size and checksum of what follows (little endian, 4 bytes each; the low half of
XXH3), then an Arrow stream, a row a response, and the routed experts of the rows as they are: they hardly compress, and
are most of a record. Where the size is LARGE, the 8 bytes behind the checksum say it. A file that was cut, or has a
flipped bit, is read up to there.
"""

import json
import logging
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import TypeAdapter

from grpo_mp.batching.routed_experts import experts_of_group, with_experts, without_experts
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.client import EngineOutput
from grpo_mp.rollout.dump import FACTS, SCHEMA, Row, experts_of, group_of_rows, rows_of
from grpo_mp.rollout.groups import EndedGroup, PausedGroup
from grpo_mp.utils.errors import one_line
from grpo_mp.utils.files import append_durably, sync_to_disk
from grpo_mp.utils.types import Prompt, SampleGroup

LOGGER = logging.getLogger(__name__)
HEADER, LARGE_SIZE = struct.Struct("<II"), struct.Struct("<Q")
LARGE = 2**32 - 1  # bytes, which a record reaches with the routed experts of a large group
LOGPROBS = SCHEMA.get_field_index("rollout_logprobs")
# Logprobs as the engine gave them: metrics are of these.
RECORD_SCHEMA = SCHEMA.set(LOGPROBS, pa.field("rollout_logprobs", pa.list_(pa.float64())))
RECORD_SCHEMA = RECORD_SCHEMA.append(pa.field("aborted", pa.bool_())).append(pa.field("cached_tokens", pa.int32()))
WRITE = pa.ipc.IpcWriteOptions(compression="zstd")
STATS = TypeAdapter(RewardStats)
GroupKey = tuple[int, int, int]  # id; index and epoch of its prompt, which differ where a repeated step launched others


class Extent(NamedTuple):
    """What is greater for the record of a group that has more of it."""

    finished: bool
    tokens: int
    kept: bool  # a finished one passes the group filter


@dataclass(frozen=True)
class Record:
    """Where a group is, and what decides whether it is taken up."""

    file: Path
    offset: int
    size: int
    key: GroupKey
    extent: Extent
    episodes: Mapping[int, int] = field(default_factory=dict)  # of an unfinished group: tokens by index in the group
    others: tuple["Record", ...] = ()  # of the same group, with more of its episodes

    def joined(self, other: "Record") -> "Record":
        """Return the record with the episodes of another, both of an unfinished group."""
        episodes = {**other.episodes, **self.episodes}
        if len(episodes) == len(self.episodes):
            return self
        extent = self.extent._replace(tokens=sum(episodes.values()))
        return replace(self, extent=extent, episodes=episodes, others=(*self.others, other, *other.others))


class GroupJournal:
    """Appends a rank's groups to its files. Thread-safe."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Name the folder of all ranks' files; nothing is written yet."""
        self._folder, self._rank, self._lock = folder, rank, threading.Lock()
        self._opened = set[Path]()

    def append(self, step: int, group_id: int, group: EndedGroup, stats: RewardStats, kept: bool) -> bool:
        """Write a group that was generated for `step`, or ahead of it, and what its scoring counted.

        Returns whether the disk took it.

        `kept`: whether a finished one passes the group filter.

        It is on disk on return, and survives the end of the host. Groups without a token are left out; so is, with a
        warning, what the disk does not take: the run still has it.
        """
        parts = encode(group_id, group, stats, kept)
        if not parts:
            return True
        file = journal_file(self._folder, step, self._rank)
        with self._lock:
            try:
                self._write(file, parts)
            except OSError as error:
                self._opened.discard(file)  # what it took of the record is cut before the next one
                LOGGER.warning("%s: group %d is not kept for a restart: %s", file, group_id, one_line(error))
                return False
        return True

    def _write(self, file: Path, parts: Sequence[memoryview]) -> None:
        is_new = file not in self._opened
        if is_new:
            file.parent.mkdir(parents=True, exist_ok=True)
            cut_torn_tail(file)
            self._opened.add(file)
        append_durably(file, [_header(parts), *parts])
        if is_new:
            for folder in (file.parent, self._folder, self._folder.parent):  # which list it
                sync_to_disk(folder)


class PausedRecords:
    """Finds what all ranks have recorded of groups that are paused; reads a file once. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Name the folder of all ranks' files; nothing is read yet."""
        self._folder, self._lock = folder, threading.Lock()
        self._read: dict[Path, tuple[int, list[Record]]] = {}  # up to where, and what

    def find(self, steps: Iterable[int], group_id: int, prompt: Prompt) -> PausedGroup | None:
        """Return the most that was recorded in these steps of a group of this prompt; None where nothing was."""
        key = group_id, prompt.index, prompt.epoch
        with self._lock:
            files = files_of_steps(self._folder, steps)
            records = [record for file in files for record in self._records(file) if record.key == key]
        best = best_records(record for record in records if not record.extent.finished)
        loaded = load(best[key], prompt) if best else None
        return loaded[0] if loaded and isinstance(loaded[0], PausedGroup) else None

    def _records(self, file: Path) -> list[Record]:
        end, records = self._read.get(file, (0, []))
        for offset, payload in _payloads(file, end):
            records.append(_record(file, offset, payload))
            end = offset + len(payload)
        self._read[file] = end, records
        return records


def journal_file(folder: Path, step: int, rank: int) -> Path:
    """Return the file to which a rank appends in a step."""
    return folder / f"step_{step:06d}" / f"rank_{rank}.journal"


def files_of_steps(folder: Path, steps: Iterable[int]) -> list[Path]:
    """Return the files of all ranks of these steps."""
    return [file for step in steps for file in sorted(journal_file(folder, step, 0).parent.glob("*.journal"))]


def prune(folder: Path, last_step: int) -> None:
    """Remove what was generated for steps up to `last_step`."""
    for step in folder.glob("step_*"):
        if step.name.removeprefix("step_").isdigit() and int(step.name.removeprefix("step_")) <= last_step:
            shutil.rmtree(step, ignore_errors=True)


def cut_torn_tail(file: Path) -> None:
    """Cut a file, where there is one, after its last whole record, so that more can be appended."""
    if not file.exists():
        return
    end = max((offset + len(payload) for offset, payload in _payloads(file)), default=0)
    if end < file.stat().st_size:
        with file.open("r+b") as stream:
            stream.truncate(end)


def read_records(file: Path) -> list[Record]:
    """Return the records of a file up to one that is damaged, which is logged."""
    records, end = [], 0
    for offset, payload in _payloads(file):
        records.append(_record(file, offset, payload))
        end = offset + len(payload)
    if end < file.stat().st_size:
        LOGGER.warning("%s is cut or damaged after %d groups: the rest is left out", file, len(records))
    return records


def best_records(records: Iterable[Record]) -> dict[GroupKey, Record]:
    """Return the record of each group that has most of it; those of its episodes are taken together."""
    best: dict[GroupKey, Record] = {}
    for record in records:
        other = best.get(record.key)
        if other and other.episodes and record.episodes:
            best[record.key] = other.joined(record)
        elif other is None or record.extent > other.extent:
            best[record.key] = record
    return best


def load(record: Record, prompt: Prompt) -> tuple[EndedGroup, RewardStats] | None:
    """Read a group of this prompt, and what its scoring counted; None where its prompt had other tokens."""
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


def with_recorded_experts(groups: Sequence[SampleGroup], folder: Path, steps: Iterable[int]) -> list[SampleGroup]:
    """Return finished groups with the experts that any rank has recorded of them in these steps.

    A group stays as it is where it has its experts, or no such record is there.
    """
    records = best_records(record for file in files_of_steps(folder, steps) for record in read_records(file))
    restored = []
    for group in groups:
        record = records.get((group.samples[0].group_id, group.prompt.index, group.prompt.epoch))
        loaded = load(record, group.prompt) if record and not experts_of_group(group) else None
        recorded = loaded[0] if loaded else None
        if isinstance(recorded, SampleGroup) and _tokens(recorded) == _tokens(group):
            group = with_experts(group, experts_of_group(recorded))
        restored.append(group)
    return restored


def _tokens(group: SampleGroup) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(part.key, part.tokens) for sample in group.samples for part in sample.sequences]


def encode(group_id: int, group: EndedGroup, stats: RewardStats, kept: bool) -> list[memoryview]:
    """Return a group as an Arrow stream, and its experts; nothing where it has no token.

    An ended episode of a paused group whose environment a reward will ask is left out: it is rolled out again.
    """
    outputs = group.outputs if isinstance(group, PausedGroup) else ()
    ended = [one for one in group.samples if not (isinstance(group, PausedGroup) and one.environment is not None)]
    samples = without_experts(SampleGroup(group.prompt, tuple(ended), finished=isinstance(group, SampleGroup)))
    rows = [*(_row_of_output(group.prompt, output) for output in outputs), *rows_of(samples, selected=False)]
    sequences = [sequence for sample in ended for sequence in sample.sequences]
    experts = [output.routed_experts for output in outputs] + [part.routed_experts for part in sequences]
    tokens = sum(len(row["tokens"]) for row in rows)
    if not tokens:
        return []
    raw = [None if of_row is None else of_row.reshape(-1).view(np.uint8).data for of_row in experts]
    for row, of_row in zip(rows, experts, strict=True):
        row["routed_experts_shape"] = None if of_row is None else of_row.shape
    finished, prompt = isinstance(group, SampleGroup), group.prompt
    sizes = [None if of_row is None else of_row.nbytes for of_row in raw]
    extent = Extent(finished, tokens, finished and kept)
    facts: dict[str, Any] = {"key": (group_id, prompt.index, prompt.epoch), "extent": extent, "experts": sizes}
    if not finished and not outputs:
        facts["episodes"] = {one.index: sum(len(part.tokens) for part in one.sequences) for one in ended}
    texts = {FACTS: json.dumps(facts), b"stats": STATS.dump_json(stats)}
    sink = pa.BufferOutputStream()
    schema = RECORD_SCHEMA.with_metadata(texts)
    with pa.ipc.new_stream(sink, schema, options=WRITE) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return [memoryview(sink.getvalue()), *(of_row for of_row in raw if of_row is not None)]


def decode(payload: bytes, prompt: Prompt) -> tuple[EndedGroup, RewardStats] | None:
    """Return the group that `encode` has written, as one of this prompt; None where its prompt had other tokens."""
    with pa.ipc.open_stream(payload) as reader:
        metadata, rows = reader.schema.metadata, reader.read_all().to_pylist()
    sizes = json.loads(metadata[FACTS]).get("experts", ())  # older versions have them in the stream
    start = len(payload) - sum(size or 0 for size in sizes)
    for row, size in zip(rows, sizes, strict=bool(sizes)):
        if size is not None:
            row["routed_experts"], start = payload[start : start + size], start + size
    if tuple(rows[0]["group_prompt_tokens"] or rows[0]["prompt_tokens"]) != prompt.tokens:
        return None
    stats = STATS.validate_json(metadata[b"stats"])
    if rows[0]["finished"]:
        return group_of_rows(rows, prompt), stats
    ended = [row for row in rows if row["aborted"] is None]  # episodes; what the engine answered says whether it was
    outputs = tuple(_output(row) for row in rows if row["aborted"] is not None)
    return PausedGroup(prompt, outputs, group_of_rows(ended, prompt).samples if ended else ()), stats


def _payloads(file: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and content of each record from `start` up to one that is cut or damaged."""
    end = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(start)
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            size, checksum = HEADER.unpack(header)
            if size == LARGE:
                (size,) = LARGE_SIZE.unpack(stream.read(LARGE_SIZE.size).ljust(LARGE_SIZE.size, b"\0"))
            offset = stream.tell()
            # No record is empty; a host that goes down may leave zeros.
            if not 0 < size <= end - offset or _checksum(payload := stream.read(size)) != checksum:
                return
            yield offset, payload


def _header(parts: Sequence[memoryview]) -> bytes:
    size = sum(part.nbytes for part in parts)
    header = HEADER.pack(min(size, LARGE), _checksum(*parts))
    return header if size < LARGE else header + LARGE_SIZE.pack(size)


def _checksum(*parts: bytes | memoryview) -> int:
    """Return 32 bits of a checksum that costs less than the write."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest() & 0xFFFFFFFF


def _record(file: Path, offset: int, payload: bytes) -> Record:
    facts: Mapping[str, Any] = json.loads(pa.ipc.open_stream(payload).schema.metadata[FACTS])
    episodes = {int(index): tokens for index, tokens in facts.get("episodes", {}).items()}  # older versions: none
    return Record(file, offset, len(payload), tuple(facts["key"]), Extent(*facts["extent"]), episodes)


def _row_of_output(prompt: Prompt, output: EngineOutput) -> Row:
    return {
        "prompt_tokens": prompt.tokens,
        "tokens": output.tokens,
        "rollout_logprobs": output.logprobs,
        "weight_versions": output.weight_versions,
        "truncated": output.truncated,
        "aborted": output.aborted,
        "verify_steps": output.verify_steps,
        "cached_tokens": output.cached_tokens,
    }


def _output(row: Row) -> EngineOutput:
    return EngineOutput(
        tuple(row["tokens"]),
        tuple(row["rollout_logprobs"]),
        tuple(row["weight_versions"]),
        truncated=row["truncated"],
        aborted=row["aborted"],
        verify_steps=row["verify_steps"],
        cached_tokens=row["cached_tokens"],
        routed_experts=experts_of(row["routed_experts"], row["routed_experts_shape"]),
    )
