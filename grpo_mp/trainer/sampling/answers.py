"""Write recorded answers: kept answers as a Parquet file, pass rates of all prompts, and a summary."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo_mp.batching.exchange import sample_infos
from grpo_mp.data.prompts import Schemas
from grpo_mp.monitor.evaluation import score_eval_set
from grpo_mp.rewards.scorer import RewardStats, sum_stats
from grpo_mp.rollout.dump import FACTS, TOKENS, open_parquet
from grpo_mp.rollout.journal import Record, best_records, load, read_records
from grpo_mp.trainer.sampling.filters import SampleFilter, apply_filters
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import as_json, encodable, incomplete
from grpo_mp.utils.types import Message, Prompt, Sample, SampleGroup

GROUPS = "groups"  # journal folder in the job's folder
SAMPLES = "samples.parquet"
PASS_RATES = "pass_rates.jsonl"
SUMMARY = "sample.json"
ROW_GROUP_BYTES = 2**26  # before compression: readers and the writer hold one row group at a time
JSON_TEXT = pa.json_()  # `datasets` reads it as objects
MESSAGE = {"role": pa.string(), "content": pa.string()}
TOOL_FIELDS = {"tool_calls": JSON_TEXT, "tool_call_id": pa.string(), "name": pa.string()}  # of episodes
COLUMNS = {
    "prompt_index": pa.int64(),
    "index": pa.int32(),
    "prompt": pa.string(),
    "response": pa.string(),
    "answer": pa.string(),
    "columns": JSON_TEXT,  # the whole data row
    "reward": pa.float64(),
    "reward_terms": JSON_TEXT,  # by name, unweighted
    "is_correct": pa.bool_(),
    "truncated": pa.bool_(),
    "state": pa.string(),
    "metrics": JSON_TEXT,
    "extra": JSON_TEXT,
    "prompt_tokens": TOKENS,
    "tokens": TOKENS,
    "logprobs": pa.list_(pa.float32()),
    "mask": pa.list_(pa.bool_()),  # true: generated
}


@dataclass(frozen=True)
class AnswerWriter:
    """Filters recorded answers, and writes them into a folder.

    `tools`: JSON schemas of the tools if answers are episodes; otherwise None.
    """

    folder: Path
    prompts: Sequence[Prompt]
    filters: Mapping[str, SampleFilter]
    tools: Schemas | None = None

    def write(self, recorded: Mapping[int, Record], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write samples and pass rates atomically, with one row group in memory at a time; return the summary."""
        dropped = Counter(dict.fromkeys(self.filters, 0))
        stats = RewardStats()
        infos = []
        kept_samples = kept_prompts = 0
        with ExitStack() as stack:
            rates = stack.enter_context(
                stack.enter_context(incomplete(self.folder / PASS_RATES)).open("w", encoding="utf-8")
            )
            write = stack.enter_context(_open_rows(self.folder / SAMPLES, self.tools is not None, facts))
            for number in sorted(recorded):
                group, of_group = self._load(recorded[number])
                kept = apply_filters(group, self.filters, dropped)
                write([row_of(group.prompt, sample, self.tools or ()) for sample in kept])
                kept_samples = kept_samples + len(kept)
                kept_prompts = kept_prompts + bool(kept)
                infos += sample_infos(group)
                stats = sum_stats([stats, of_group])
                rates.write(_rate_line(group))
        score = asdict(score_eval_set(infos)) if infos else {}
        return {
            "answered_prompts": len(recorded),
            "samples": len(infos),
            "kept": kept_samples,
            "kept_prompts": kept_prompts,
            "dropped": dict(dropped),
            **{name: score.get(name) for name in ("accuracy", "accuracy_error", "reward", "length", "truncated_ratio")},
            "pass_at": {k: estimate["value"] for k, estimate in score.get("pass_at", {}).items()},
            "rewards": stats.to_dict(),
        }

    def _load(self, record: Record) -> tuple[SampleGroup, RewardStats]:
        number = record.key[0]
        loaded = load(record, self.prompts[number])
        if loaded is None or not isinstance(loaded[0], SampleGroup):
            raise UserError(
                f"{self.folder}: prompt {number} is another than the one that was answered: the data has changed: "
                "choose another --out"
            )
        return loaded[0], loaded[1]


def read_recorded(folder: Path, prompts: int, place: int = 0, readers: int = 1) -> dict[int, Record]:
    """Return prompt -> record for the first `prompts` prompts, from the journals of reader `place` of `readers`."""
    files = sorted((folder / GROUPS).glob("step_*/*.journal"))
    records = best_records(record for file in files[place::readers] for record in read_records(file))
    return {record.key[0]: record for record in records.values() if record.key[0] < prompts}


def row_of(prompt: Prompt, sample: Sample, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return an answer as a row of the Parquet file. `tools`: JSON schemas of the tools."""
    said = list(sample.messages) or [{"role": "assistant", "content": sample.text}]
    return {
        "messages": [_message(message) for message in (*prompt.messages, *said)],
        "tools": _json(tools) if tools else None,
        "prompt_index": prompt.index,
        "index": sample.index,
        "prompt": encodable(prompt.text),
        "response": encodable(sample.text),
        "answer": None if prompt.answer is None else encodable(prompt.answer),
        "columns": _json(prompt.columns),
        "reward": sample.reward,
        "reward_terms": _json(sample.reward_terms),
        "is_correct": sample.is_correct,
        "truncated": sample.truncated,
        "state": sample.state,
        "metrics": _json(sample.metrics),
        "extra": _json(sample.extra),
        "prompt_tokens": sample.prompt_tokens,
        "tokens": sample.tokens,
        "logprobs": sample.rollout_logprobs,
        "mask": sample.generated or (True,) * len(sample.tokens),
    }


def _message(message: Message) -> dict[str, Any]:
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


def _rate_line(group: SampleGroup) -> str:
    verdicts = [sample.is_correct for sample in group.samples if sample.is_correct is not None]
    if not verdicts:
        return ""
    prompt = group.prompt
    rate = sum(verdicts) / len(verdicts)
    row = {"prompt": prompt.text, "pass_rate": rate, "samples": len(verdicts), "prompt_index": prompt.index}
    return json.dumps(row, ensure_ascii=False) + "\n"


@contextmanager
def _open_rows(file: Path, has_tools: bool, facts: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a function that writes rows; at the end, replace the file, unless the body raises."""
    columns = {
        "messages": pa.list_(pa.struct(MESSAGE | (TOOL_FIELDS if has_tools else {}))),
        **({"tools": JSON_TEXT} if has_tools else {}),
        **COLUMNS,
    }
    schema = pa.schema(columns, metadata={FACTS: json.dumps(facts).encode()})
    # Python rows become text columns first, which are then cast to JSON.
    as_text = pa.schema([pa.field(name, _as_text(kind)) for name, kind in columns.items()])
    tables: list[pa.Table] = []
    with open_parquet(file, schema) as writer:

        def write(rows: Iterable[dict[str, Any]], at_least: int = ROW_GROUP_BYTES) -> None:
            tables.append(pa.Table.from_pylist(list(rows), as_text).cast(schema))
            if sum(table.nbytes for table in tables) >= at_least:
                table = pa.concat_tables(tables)
                writer.write_table(table, row_group_size=max(1, len(table)))
                tables.clear()

        yield write
        write([], at_least=0)


def _as_text(kind: pa.DataType) -> pa.DataType:
    if kind == JSON_TEXT:
        return pa.string()
    if isinstance(kind, pa.StructType):
        return pa.struct([pa.field(part.name, _as_text(part.type)) for part in kind])
    return pa.list_(_as_text(kind.value_type)) if isinstance(kind, pa.ListType) else kind
