"""Kept answers as rows of a Parquet file: chat messages to train on, and tokens, logprobs and rewards to audit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from grpo_mp.rollout.client import sampling_seed
from grpo_mp.rollout.dump import FACTS, TOKENS, checked_file
from grpo_mp.utils.files import as_json, encodable
from grpo_mp.utils.types import Message, Prompt, Sample

ROW_GROUP_BYTES = 2**26  # of a row group before compression: readers and writers hold one at a time
JSON_TEXT = pa.json_()  # `datasets` reads it as objects
MESSAGE = {"role": pa.string(), "content": pa.string()}
TOOL_FIELDS = {"tool_calls": JSON_TEXT, "tool_call_id": pa.string(), "name": pa.string()}  # of episodes
COLUMNS = {
    "prompt_index": pa.int64(),
    "group_id": pa.int64(),
    "index": pa.int32(),
    "prompt": pa.string(),
    "response": pa.string(),
    "answer": pa.string(),
    "columns": JSON_TEXT,  # the whole data row
    "reward": pa.float64(),
    "is_scored": pa.bool_(),  # false: the reward is the mean of the prompt's others
    "reward_terms": JSON_TEXT,  # by name, unweighted
    "is_correct": pa.bool_(),
    "truncated": pa.bool_(),
    "state": pa.string(),
    "error": pa.string(),
    "episode_reward": pa.float64(),
    "step_rewards": pa.list_(pa.struct({"token": pa.int32(), "reward": pa.float64()})),
    "metrics": JSON_TEXT,
    "extra": JSON_TEXT,
    "prompt_tokens": TOKENS,
    "tokens": TOKENS,
    "logprobs": pa.list_(pa.float32()),
    "mask": pa.list_(pa.bool_()),  # true: generated
    "seed": pa.int64(),  # null: the engine drew freely
    "weight_version": pa.int32(),  # the newest that generated a token
    "model": pa.string(),
    "model_digest": pa.string(),
    "settings_digest": pa.string(),
}
Row = dict[str, Any]


def schema_of(is_chat_of_tools: bool) -> pa.Schema:
    """Return the columns; of episodes there are the tools that the template was given, and calls in the messages."""
    message = pa.struct(MESSAGE | (TOOL_FIELDS if is_chat_of_tools else {}))
    tools = {"tools": JSON_TEXT} if is_chat_of_tools else {}
    return pa.schema({"messages": pa.list_(message), **tools, **COLUMNS})


@dataclass(frozen=True)
class Source:
    """What all answers of a sampling have in common."""

    model: str
    model_digest: str
    settings_digest: str
    seed: int | None  # of all prompts; None: engines drew freely


def row_of(prompt: Prompt, sample: Sample, source: Source, tools: Sequence[Mapping[str, Any]] = ()) -> Row:
    """Return an answer as a row of `schema_of`; `tools`: their JSON schemas."""
    seed = source.seed
    return {
        "messages": [_message(message) for message in chat_of(prompt, sample)],
        "tools": _json(tools) if tools else None,
        "prompt_index": prompt.index,
        "group_id": sample.group_id,
        "index": sample.index,
        "prompt": encodable(prompt.text),
        "response": encodable(sample.text),
        "answer": None if prompt.answer is None else encodable(prompt.answer),
        "columns": _json(prompt.columns),
        "reward": sample.reward,
        "is_scored": sample.is_scored,
        "reward_terms": _json(sample.reward_terms),
        "is_correct": sample.is_correct,
        "truncated": sample.truncated,
        "state": sample.state,
        "error": encodable(sample.error),
        "episode_reward": sample.episode_reward,
        "step_rewards": [{"token": token, "reward": reward} for token, reward in sample.step_rewards],
        "metrics": _json(sample.metrics),
        "extra": _json(sample.extra),
        "prompt_tokens": sample.prompt_tokens,
        "tokens": sample.tokens,
        "logprobs": sample.rollout_logprobs,
        "mask": sample.generated or (True,) * len(sample.tokens),
        "seed": None if seed is None else sampling_seed(seed, prompt.index, prompt.epoch, sample.index),
        "weight_version": max(sample.weight_versions),
        "model": source.model,
        "model_digest": source.model_digest,
        "settings_digest": source.settings_digest,
    }


def chat_of(prompt: Prompt, sample: Sample) -> list[Message]:
    """Return the conversation of a prompt and its answer, of an episode with all turns and tools' results."""
    said = list(sample.messages) or [{"role": "assistant", "content": sample.text}]
    return [*prompt.messages, *said]


def _message(message: Message) -> Row:
    """Return a message as a struct; keys that its type lacks are left out."""
    calls = message.get("tool_calls")
    return {
        "role": message["role"],
        "content": encodable(str(message.get("content") or "")),
        "tool_calls": _json(calls) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def _json(value: Any) -> str:
    return encodable(as_json(value, ensure_ascii=False))


@dataclass
class RowWriter:
    """Writes rows; memory holds a row group."""

    writer: parquet.ParquetWriter
    schema: pa.Schema
    rows: int = 0
    _tables: list[pa.Table] = field(default_factory=list, init=False)
    _bytes: int = field(default=0, init=False)

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows of a prompt."""
        if rows:
            table = pa.Table.from_pylist(rows, _storage(self.schema)).cast(self.schema)
            self._tables.append(table)
            self._bytes += table.nbytes
            self.rows += len(rows)
        if self._bytes >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """End a row group."""
        if self._tables:
            table = pa.concat_tables(self._tables)
            self.writer.write_table(table, row_group_size=max(1, len(table)))
        self._tables, self._bytes = [], 0


@contextmanager
def open_part(file: Path, schema: pa.Schema) -> Iterator[RowWriter]:
    """Open a part of the answers for writing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        rows = RowWriter(writer, schema)
        yield rows
        rows.flush()


def join_parts(parts: Iterable[Path], file: Path, schema: pa.Schema, facts: str) -> None:
    """Write the parts one after the other into one file, which is whole or absent, with its checksum beside it."""
    described = schema.with_metadata({FACTS: facts.encode()})
    with checked_file(file) as temporary, parquet.ParquetWriter(temporary, described, compression="zstd") as writer:
        for part in parts:
            with parquet.ParquetFile(part) as content:
                for number in range(content.num_row_groups):
                    table = content.read_row_group(number).replace_schema_metadata(described.metadata)
                    writer.write_table(table, row_group_size=max(1, len(table)))


def _storage(schema: pa.Schema) -> pa.Schema:
    """Return the schema with text where it has JSON, which rows of Python are not turned into."""
    return pa.schema([pa.field(column.name, _as_text(column.type)) for column in schema])


def _as_text(kind: pa.DataType) -> pa.DataType:
    if kind == JSON_TEXT:
        return pa.string()
    if isinstance(kind, pa.StructType):
        return pa.struct([pa.field(part.name, _as_text(part.type)) for part in kind])
    if isinstance(kind, pa.ListType):
        return pa.list_(_as_text(kind.value_type))
    return kind
