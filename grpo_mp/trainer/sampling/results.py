"""From recorded answers to files: filter them, write the kept ones, and count what became of all."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_mp.algorithms.evaluation import k_values, mean_over_problems, pass_at_k
from grpo_mp.data.prompts import ToolsOf
from grpo_mp.data.rows import Row
from grpo_mp.rewards.scorer import RewardStats, sum_stats
from grpo_mp.rollout.journal import Record, best_records, load, read_records
from grpo_mp.trainer.sampling.filters import SampleFilter, apply_filters, response_tokens
from grpo_mp.trainer.sampling.table import Source, join_parts, open_part, row_of, schema_of
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import sync_to_disk
from grpo_mp.utils.types import Prompt, SampleGroup

GROUPS, PARTS = "groups", "parts"  # folders below that of the answers
SAMPLES, PASS_RATES, SUMMARY = "samples.parquet", "pass_rates.jsonl", "sample.json"


@dataclass
class Counts:
    """What became of the answers of some prompts."""

    prompts: int = 0
    samples: int = 0
    kept: int = 0
    kept_prompts: int = 0
    scored: int = 0  # samples that have a reward
    reward: float = 0.0  # its sum over them
    tokens: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by filter
    judged: Counter[tuple[int, int]] = field(default_factory=Counter)  # prompts by (answers, right ones)
    rewards: RewardStats = field(default_factory=RewardStats)

    def add(self, group: SampleGroup, kept: int) -> None:
        """Count a prompt."""
        self.prompts += 1
        self.samples += len(group.samples)
        self.kept += kept
        self.kept_prompts += kept > 0
        rewards = [sample.reward for sample in group.samples if sample.is_scored]
        self.scored += len(rewards)
        self.reward += sum(rewards)
        self.tokens += sum(map(response_tokens, group.samples))
        self.truncated += sum(sample.truncated for sample in group.samples)
        if judged := _verdicts(group):
            self.judged[len(judged), sum(judged)] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as they are written to JSON; means are over samples, accuracy and pass@k over prompts."""
        counts = self.judged
        shares = [right / n for (n, right), prompts in counts.items() for _ in range(prompts)]
        accuracy = mean_over_problems(shares) if shares else None
        samples = max(1, self.samples)
        return {
            "answered_prompts": self.prompts,
            "samples": self.samples,
            "kept": self.kept,
            "kept_prompts": self.kept_prompts,
            "dropped": dict(self.dropped),
            "accuracy": accuracy.value if accuracy else None,
            "accuracy_error": accuracy.error if accuracy else None,
            "pass_at": _pass_at(counts),
            "reward": self.reward / max(1, self.scored),
            "tokens": self.tokens / samples,
            "truncated_ratio": self.truncated / samples,
            "rewards": self.rewards.to_dict(),
        }


def sum_counts(parts: Sequence[Counts]) -> Counts:
    """Add up the counts of several parts."""
    total = Counts(rewards=sum_stats(part.rewards for part in parts))
    for part in parts:
        total.dropped.update(part.dropped)
        total.judged.update(part.judged)
    names = ("prompts", "samples", "kept", "kept_prompts", "scored", "reward", "tokens", "truncated")
    return replace(total, **{name: sum(vars(part)[name] for part in parts) for name in names})


def _pass_at(counts: Mapping[tuple[int, int], int]) -> dict[int, float]:
    """Return pass@k by k, over the prompts with at least k judged answers."""
    most = max((n for n, _ in counts), default=0)
    values = {
        k: [pass_at_k(n, right, k) for (n, right), prompts in counts.items() if n >= k for _ in range(prompts)]
        for k in (k_values(most) if most > 1 else ())
    }
    return {k: fmean(of_k) for k, of_k in values.items() if of_k}


def _verdicts(group: SampleGroup) -> list[bool]:
    return [sample.is_correct for sample in group.samples if sample.is_correct is not None]


def recorded_share(folder: Path, rank: int, size: int) -> dict[int, Record]:
    """Return what this of `size` ranks finds in its share of the journal's files, by prompt."""
    files = sorted((folder / GROUPS).glob("step_*/*.journal"))
    records = best_records(record for file in files[rank::size] for record in read_records(file))
    return {record.key[0]: record for record in records.values()}


def share_of_prompts(recorded: Mapping[int, Record], rank: int, size: int) -> list[Record]:
    """Return the records of a rank's part of the prompts, in their order; the parts follow one another."""
    prompts = sorted(recorded)
    return [recorded[prompt] for prompt in prompts[len(prompts) * rank // size : len(prompts) * (rank + 1) // size]]


@dataclass(frozen=True)
class PartWriter:
    """Filters recorded groups, and writes the part of a rank."""

    folder: Path
    rank: int
    prompts: Sequence[Prompt]
    filters: Mapping[str, SampleFilter]
    source: Source
    tools: ToolsOf | None  # of a prompt's row, where answers are episodes

    def write(self, records: Iterable[Record]) -> Counts:
        """Write the kept answers and all pass rates; return what became of them. Holds one group at a time."""
        counts = Counts(dropped=Counter(dict.fromkeys(self.filters, 0)))
        file, rates_file = part_files(self.folder, self.rank)
        schema = schema_of(self.tools is not None)
        with open_part(file, schema) as part, rates_file.open("w", encoding="utf-8") as rates:
            for record in records:
                group, of_group = self._load(record)
                kept = apply_filters(group, self.filters, counts.dropped)
                tools = self.tools(Row(f"prompt {group.prompt.index}", group.prompt.columns)) if self.tools else ()
                rows = [row_of(group.prompt, sample, self.source, tools) for sample in kept]
                part.write(rows)
                counts.add(group, len(rows))
                counts.rewards = sum_stats([counts.rewards, of_group])
                if judged := _verdicts(group):
                    rates.write(_rate_line(group.prompt, judged))
        return counts

    def _load(self, record: Record) -> tuple[SampleGroup, RewardStats]:
        number = record.key[0]
        loaded = load(record, self.prompts[number])
        if loaded is None or not isinstance(loaded[0], SampleGroup):
            raise UserError(
                f"{self.folder}: prompt {number} is another than the one that was answered: the data has changed: "
                "choose another --out"
            )
        return loaded[0], loaded[1]


def _rate_line(prompt: Prompt, judged: Sequence[bool]) -> str:
    row = {
        "prompt": prompt.text,
        "pass_rate": sum(judged) / len(judged),
        "samples": len(judged),
        "prompt_index": prompt.index,
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def part_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the files of a rank's part: kept answers, and pass rates."""
    return folder / PARTS / f"rank_{rank}.parquet", folder / PARTS / f"rank_{rank}.jsonl"


def join(folder: Path, ranks: int, has_episodes: bool, facts: str) -> None:
    """Join the parts of all ranks to the folder's files, each of them whole or as it was, and remove the parts."""
    parts = [part_files(folder, rank) for rank in range(ranks)]
    temporary = folder / f"{PASS_RATES}.incomplete"
    with temporary.open("wb") as rates:
        for _, file in parts:
            with file.open("rb") as lines:
                while block := lines.read(2**20):
                    rates.write(block)
    sync_to_disk(temporary)
    join_parts([file for file, _ in parts], folder / SAMPLES, schema_of(has_episodes), facts)
    temporary.replace(folder / PASS_RATES)
    for files in parts:
        for file in files:
            file.unlink()
    (folder / PARTS).rmdir()
