"""Write sampled answers for people to read: JSON lines in the run folder, Markdown for the loggers."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_mp.utils.files import as_json, encodable, write_atomically
from grpo_mp.utils.types import Sample, SampleGroup

T = TypeVar("T")
STEP_FILE = re.compile(r"(?:step|eval)_([0-9]+)\.jsonl?")  # other files are copies that users made
SHOWN_SAMPLES = 4  # groups of a step whose texts are logged


def write_samples(run_folder: Path, step: int, groups: Iterable[SampleGroup]) -> None:
    """Write all samples of a step to `<run>/samples/step_000012.jsonl`."""
    write_atomically(run_folder / "samples" / f"step_{step:06d}.jsonl", "".join(sample_lines(groups)))


def write_eval_samples(run_folder: Path, step: int, groups_by_set: Mapping[str, Iterable[SampleGroup]]) -> None:
    """Write the sampled answers to the eval sets to `<run>/samples/eval_000020.jsonl`."""
    lines = [line for name, groups in groups_by_set.items() for line in sample_lines(groups, set=name)]
    write_atomically(run_folder / "samples" / f"eval_{step:06d}.jsonl", "".join(lines))


def drop_later_files(run_folder: Path, first_step: int) -> None:
    """Remove the samples and scores that an earlier process wrote for `first_step` and later steps."""
    for path in (*(run_folder / "samples").glob("*.jsonl"), *(run_folder / "eval").glob("*.json")):
        match = STEP_FILE.fullmatch(path.name)
        if match and int(match[1]) >= first_step:
            path.unlink()


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` items at even distances."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def append_samples(file: Path, name: str, groups: Iterable[SampleGroup]) -> None:
    """Append all samples of the eval set `name` to a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(sample_lines(groups, set=name))


def sample_lines(groups: Iterable[SampleGroup], **columns: Any) -> Iterator[str]:
    """Yield each sample as a line of JSON that begins with `columns`. Values unknown to JSON become text."""
    for group in groups:
        for sample in group.samples:
            yield encodable(as_json(columns | sample_record(group, sample), ensure_ascii=False)) + "\n"


def sample_record(group: SampleGroup, sample: Sample) -> dict[str, Any]:
    """Return a sample as a JSON object. `weight_version` holds the versions of the first and last token."""
    messages = [{**message, "of": one.role} for one in sample.sequences for message in one.messages]
    return {
        "prompt": group.prompt.text,
        "expected": group.prompt.answer,
        "response": sample.text,
        "reward": sample.reward,
        "terms": sample.reward_terms,
        "is_correct": sample.is_correct,
        "extra": sample.extra,
        "truncated": sample.truncated,
        **({"state": sample.state, "messages": messages, "error": sample.error} if sample.state else {}),
        "tokens": len(sample.tokens),
        "prompt_tokens": len(sample.prompt_tokens),
        "weight_version": [sample.weight_versions[0], sample.weight_versions[-1]],
        "prompt_index": group.prompt.index,
        "group_id": sample.group_id,
        "index": sample.index,
    }


def samples_to_markdown(groups: Sequence[SampleGroup]) -> str:
    """Render the best and the worst answer of each group as Markdown. Model text is a code block, never markup."""
    blocks = []
    for group in groups:
        ordered = sorted(group.samples, key=lambda sample: sample.reward, reverse=True)
        shown = ordered[:1] + ordered[-1:] if len(ordered) > 1 else ordered
        expected = "" if group.prompt.answer is None else f"\n\nexpected: {_code_block(group.prompt.answer)}"
        parts = [f"**prompt {group.prompt.index}**", _code_block(group.prompt.text) + expected]
        for sample in shown:  # columns of reward functions may hold model text
            extra = [_code_block(f"{column}: {value}") for column, value in sample.extra.items()]
            parts += [f"reward {sample.reward:g}", *extra, _code_block(sample.text)]
        blocks.append("\n\n".join(parts))
    return encodable("\n\n---\n\n".join(blocks))


def _code_block(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines() or [""])
