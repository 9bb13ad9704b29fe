"""Sampled answers of a step, to be read by people: JSON lines in the run folder and a text in TensorBoard."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_mp.monitor.writer import MetricWriter
from grpo_mp.types import Sample, SampleGroup

T = TypeVar("T")


class SampleWriter:
    """Writes `<run>/samples/step_000012.jsonl`, and the best and worst answer of each group to TensorBoard.

    `groups_per_step` groups are kept, spread evenly over the step; 0 keeps all. Only rank 0 makes a writer.
    Files of `first_step` and later steps, left by an earlier process, are removed.
    """

    def __init__(
        self, run_folder: Path, metrics: MetricWriter | None = None, groups_per_step: int = 8, first_step: int = 0
    ) -> None:
        self._folder = run_folder / "samples"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = metrics
        self._groups_per_step = groups_per_step
        for path in self._folder.glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) >= first_step:
                path.unlink()

    def write(self, step: int, groups: Sequence[SampleGroup], name: str = "rollout/samples") -> Path:
        """Write the chosen groups of one step and return the file. `name` is a text metric of the dictionary."""
        chosen = spread(groups, self._groups_per_step)
        path = self._folder / f"step_{step:06d}.jsonl"
        path.write_text("".join(lines_of(chosen)), encoding="utf-8")
        if self._metrics is not None:
            self._metrics.text(step, name, markdown(chosen))
        return path


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return `count` items at even distances; all of them for 0 or when there are no more."""
    if count == 0 or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def add_samples(file: Path, name: str, groups: Iterable[SampleGroup]) -> None:
    """Append every sample of a set, one JSON object a line."""
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(lines_of(groups, set=name))


def lines_of(groups: Iterable[SampleGroup], **said: Any) -> Iterator[str]:
    """Every sample as a line of JSON; what JSON does not know, such as a user's own objects, as text."""
    for group in groups:
        for sample in group.samples:
            yield json.dumps(said | record(group, sample), ensure_ascii=False, default=str) + "\n"


def record(group: SampleGroup, sample: Sample) -> dict[str, Any]:
    """One sample as a JSON object. `weight_version` is that of the first and last token."""
    return {
        "prompt": group.prompt.text,
        "expected": group.prompt.answer,
        "response": sample.text,
        "reward": sample.reward,
        "parts": sample.reward_parts,
        "right": sample.right,
        "extra": sample.extra,
        "truncated": sample.truncated,
        "tokens": len(sample.tokens),
        "prompt_tokens": len(sample.prompt_tokens),
        "weight_version": [sample.weight_versions[0], sample.weight_versions[-1]],
        "prompt_index": group.prompt.index,
        "group_id": sample.group_id,
        "index": sample.index,
    }


def markdown(groups: Sequence[SampleGroup]) -> str:
    """The best and the worst answer of each group, as Markdown. Model text is shown as code, never as markup."""
    blocks = []
    for group in groups:
        ordered = sorted(group.samples, key=lambda sample: sample.reward, reverse=True)
        shown = ordered[:1] + ordered[-1:] if len(ordered) > 1 else ordered
        expected = "" if group.prompt.answer is None else f"\n\nexpected: {_code(group.prompt.answer)}"
        answers = "\n\n".join(f"{_verdict(sample)}\n\n{_code(sample.text)}" for sample in shown)
        blocks.append(f"**prompt {group.prompt.index}**\n\n{_code(group.prompt.text)}{expected}\n\n{answers}")
    return "\n\n---\n\n".join(blocks)


def _verdict(sample: Sample) -> str:
    """The reward, and as code, because they may hold model text, the columns of reward functions."""
    extra = "".join(f"\n\n{_code(f'{column}: {value}')}" for column, value in sample.extra.items())
    return f"reward {sample.reward:g}{extra}"


def _code(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines() or [""])
