"""Lossless Parquet files of groups: a row is a sample, a Parquet row group is a group of samples.

An episode that forked has a row for each of its token sequences; the last row has the fields of the whole episode.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.files import as_json, encodable, incomplete, sync_to_disk
from grpo_mp.utils.reading import check_regular
from grpo_mp.utils.types import ExpertIds, KeptTokens, Message, Prompt, Sample, SampleGroup, TopLogprobs

FACTS = b"grpo_mp"  # key of the metadata in the file's footer
TOKENS = pa.list_(pa.int32())
NUMBERS = pa.map_(pa.string(), pa.float64())
SCHEMA = pa.schema(
    {
        "group_id": pa.int64(),
        "index": pa.int32(),
        # Number (from 1) of an earlier sequence of an episode that forked, whose row precedes the last one; 0: last.
        "part": pa.int32(),
        "selected": pa.bool_(),  # whether the step trains on the sample
        "finished": pa.bool_(),
        "prompt_index": pa.int64(),
        "prompt": pa.string(),
        "answer": pa.string(),
        "prompt_tokens": TOKENS,
        "group_prompt_tokens": TOKENS,  # null: equal to prompt_tokens
        "tokens": TOKENS,
        "generated": pa.list_(pa.bool_()),  # empty: all tokens are generated
        "rollout_logprobs": pa.list_(pa.float32()),  # float32, as in training
        "teacher_logprobs": pa.list_(pa.float32()),  # of algorithm.distillation; empty: no teacher
        "teacher_prompt": TOKENS,  # of self-distillation; empty: no teacher
        "teacher_topk_ids": pa.large_binary(),  # int32 [tokens, distillation.topk]; null: no teacher
        "teacher_topk_logprobs": pa.large_binary(),  # float32 [tokens, distillation.topk]; null: no teacher
        "weight_versions": TOKENS,
        "text": pa.string(),
        "truncated": pa.bool_(),
        "state": pa.string(),
        "error": pa.string(),
        "reward": pa.float64(),
        "reward_terms": NUMBERS,
        "is_scored": pa.bool_(),
        "step_rewards": pa.list_(pa.struct({"token": pa.int32(), "reward": pa.float64()})),
        "is_correct": pa.bool_(),
        "episode_reward": pa.float64(),
        "metrics": NUMBERS,
        "messages": pa.string(),  # JSON
        "extra": pa.string(),  # JSON
        "verify_steps": pa.int32(),
        "routed_experts": pa.large_binary(),
        "routed_experts_shape": pa.list_(pa.int32()),
        "kept_ids": TOKENS,  # of truncated sampling, position after position; null: full distribution
        "kept_counts": TOKENS,  # number of kept tokens at each position
        "role": pa.string(),
    }
)
LISTS = ("prompt_tokens", "tokens", "generated", "rollout_logprobs", "weight_versions")
OTHERS = ("group_id", "index", "truncated", "state", "reward", "is_correct", "episode_reward", "verify_steps")
Row = dict[str, Any]


def write_groups(file: Path, groups: Iterable[SampleGroup], selected: Collection[int], facts: str) -> None:
    """Write groups to a Parquet file, one group at a time.

    `selected`: ids of the groups that the step trains on; `facts`: text for the file's metadata.
    """
    schema = SCHEMA.with_metadata({FACTS: facts.encode()})
    with open_parquet(file, schema) as writer:
        for group in groups:
            rows = rows_of(group, bool(group.samples) and group.samples[0].group_id in selected)
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema))


@contextmanager
def open_parquet(file: Path, schema: pa.Schema) -> Iterator[parquet.ParquetWriter]:
    """Yield a writer of a Parquet file with page checksums; the file appears when the body has ended."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with incomplete(file) as temporary:
        with parquet.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True) as writer:
            yield writer
        sync_to_disk(temporary)


def read_facts(file: Path) -> bytes:
    """Return the text that `write_groups` stored as `facts`, read from the file's footer."""
    try:
        metadata = parquet.read_schema(check_regular(file)).metadata or {}
        return bytes(metadata[FACTS])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:  # ValueError: a column name is not UTF-8
        raise _damaged(file, error) from error


def read_groups(file: Path) -> list[tuple[SampleGroup, bool]]:
    """Read the groups of a file, each as (group, whether its step trains on the group)."""
    try:
        with parquet.ParquetFile(check_regular(file), page_checksum_verification=True) as content:
            rows: list[Row] = content.read().to_pylist()
        by_group = [list(of_group) for _, of_group in groupby(rows, lambda row: row["group_id"])]
        return [(group_of_rows(of_group), bool(of_group[0]["selected"])) for of_group in by_group]
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"{file}: damaged, or no rollouts that rollout.dump wrote ({one_line(error, 200)}): copy it again")


def rows_of(group: SampleGroup, selected: bool) -> list[Row]:
    """Return the samples of a group as rows of SCHEMA. `selected`: whether the step trains on the group."""
    return [_row_of(group, part, selected) for sample in group.samples for part in sample.sequences]


def _row_of(group: SampleGroup, sample: Sample, selected: bool) -> Row:
    prompt = group.prompt
    experts = sample.routed_experts
    topk = sample.teacher_topk
    return {name: vars(sample)[name] for name in (*LISTS, *OTHERS, "part", "role")} | {
        "selected": selected,
        "finished": group.finished,
        "prompt_index": prompt.index,
        "prompt": encodable(prompt.text),
        "answer": None if prompt.answer is None else encodable(prompt.answer),
        "group_prompt_tokens": None if prompt.tokens == sample.prompt_tokens else prompt.tokens,
        "teacher_logprobs": sample.teacher_logprobs,
        "teacher_prompt": sample.teacher_prompt,
        "teacher_topk_ids": topk and topk.ids.tobytes(),
        "teacher_topk_logprobs": topk and topk.logprobs.tobytes(),
        "text": encodable(sample.text),
        "error": encodable(sample.error),
        "is_scored": sample.is_scored,
        "reward_terms": list(sample.reward_terms.items()),
        "metrics": list(sample.metrics.items()),
        "step_rewards": [{"token": token, "reward": reward} for token, reward in sample.step_rewards],
        "messages": as_json(sample.messages),
        "extra": as_json(sample.extra),
        "routed_experts": None if experts is None else experts.tobytes(),
        "routed_experts_shape": None if experts is None else _sizes(experts),
        "kept_ids": sample.kept and sample.kept.ids,
        "kept_counts": sample.kept and sample.kept.counts,
    }


def group_of_rows(rows: Sequence[Row], prompt: Prompt | None = None) -> SampleGroup:
    """Return the group of these rows. `prompt`: replaces the stored prompt; None: keep the stored prompt."""
    first = rows[0]
    tokens = tuple(first["group_prompt_tokens"] or first["prompt_tokens"])
    written = Prompt(first["prompt_index"], first["prompt"], tokens, first["answer"])
    samples = list[Sample]()
    earlier = list[Sample]()
    for row in rows:
        if row["part"]:
            earlier.append(_sample(row, row["part"]))
        else:
            samples.append(replace(_sample(row), earlier=tuple(earlier)))
            earlier = []
    return SampleGroup(prompt or written, tuple(samples), first["finished"])


def _sample(row: Row, part: int = 0) -> Sample:
    messages: list[Message] = json.loads(row["messages"])
    same: Row = {name: row[name] for name in OTHERS} | {name: tuple(row[name]) for name in LISTS}
    return Sample(
        **same,
        teacher_logprobs=tuple(row["teacher_logprobs"]),
        teacher_prompt=tuple(row.get("teacher_prompt") or ()),
        teacher_topk=_topk(row["teacher_topk_ids"], row["teacher_topk_logprobs"], len(row["tokens"])),
        text=row["text"],
        error=row["error"],
        is_scored=row["is_scored"],
        reward_terms=dict(row["reward_terms"]),
        metrics=dict(row["metrics"]),
        step_rewards=tuple((step["token"], step["reward"]) for step in row["step_rewards"]),
        messages=tuple(messages),
        extra=json.loads(row["extra"]),
        routed_experts=experts_of(row["routed_experts"], row["routed_experts_shape"]),
        kept=_kept(row.get("kept_ids"), row.get("kept_counts")),
        part=part,
        role=row.get("role") or "",
    )


def _topk(ids: bytes | None, logprobs: bytes | None, tokens: int) -> TopLogprobs | None:
    if ids is None or logprobs is None:
        return None
    of_ids = np.frombuffer(ids, np.int32)
    of_logprobs = np.frombuffer(logprobs, np.float32)
    return TopLogprobs(of_ids.reshape(tokens, -1).copy(), of_logprobs.reshape(tokens, -1).copy())


def _kept(ids: list[int] | None, counts: list[int] | None) -> KeptTokens | None:
    return None if ids is None else KeptTokens(np.array(ids, np.int32), np.array(counts, np.int32))


def _sizes(choices: ExpertIds) -> tuple[int, ...]:
    """Return [tokens, MoE layers, top-k]; with keys [tokens, MoE layers, top-k, indexers, keys]."""
    fields: Mapping[str, Any] = choices.dtype.fields or {}
    return choices.shape + tuple(size for kind, *_ in fields.values() for size in kind.shape)


def experts_of(content: bytes | None, shape: list[int] | None) -> ExpertIds | None:
    """Return stored choices as an array: expert ids are uint8 if `content` has one byte for each of them, else int16.

    `shape`: see `_sizes`.
    """
    if content is None or shape is None:
        return None
    tokens = shape[0]
    sizes = tuple(shape[1:3])
    of_keys = tuple(shape[3:])
    keys = 4 * math.prod(of_keys) if of_keys else 0
    ids = np.dtype(np.uint8 if len(content) == tokens * (math.prod(sizes) + keys) else np.int16)
    dtype = np.dtype([("experts", ids, sizes), ("keys", np.int32, of_keys)]) if of_keys else ids
    # frombuffer returns a read-only array
    return np.frombuffer(content, dtype).reshape(tokens if of_keys else shape).copy()
