"""Groups that a job began for later steps, in a file that the next job reads: tokens as the engine gave them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from grpo_mp.data.prompts import PromptSet
from grpo_mp.rollout.client import EngineOutput
from grpo_mp.rollout.worker import EndedGroup, PausedGroup
from grpo_mp.types import ExpertIds, Sample

SavedGroups = Mapping[int, PausedGroup]  # by number in the launch order of the step that comes next


def save_groups(file: Path, ended: Mapping[int, EndedGroup], group_size: int) -> None:
    """Write groups, finished or paused; those without tokens are left out. A finished one is scored again."""
    groups = {number: as_paused(group, group_size) for number, group in ended.items()}
    rows = [
        (number, group.prompt.index, output)
        for number, group in sorted(groups.items())
        if group
        for output in group.outputs
    ]
    if not rows:
        return
    outputs = [output for _, _, output in rows]
    arrays = {
        "number": np.array([number for number, _, _ in rows]),
        "prompt": np.array([prompt for _, prompt, _ in rows]),
        "length": np.array([len(output.tokens) for output in outputs]),
        "truncated": np.array([output.truncated for output in outputs]),
        "aborted": np.array([output.aborted for output in outputs]),
        "cached_tokens": np.array([output.cached_tokens for output in outputs]),
        "tokens": np.array([token for output in outputs for token in output.tokens]),
        "logprobs": np.array([value for output in outputs for value in output.logprobs]),
        "weight_versions": np.array([version for output in outputs for version in output.weight_versions]),
    }
    routed = {f"routed_experts/{place}": output.routed_experts for place, output in enumerate(outputs)}
    arrays |= {name: np.ascontiguousarray(ids) for name, ids in routed.items() if ids is not None}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    save_file(arrays, unfinished)
    unfinished.rename(file)


def load_groups(files: Iterable[Path], prompts: PromptSet) -> SavedGroups:
    """Read the groups of all files."""
    groups: dict[int, PausedGroup] = {}
    for file in files:
        arrays = load_file(file)
        rows = zip(arrays["number"].tolist(), arrays["prompt"].tolist(), _outputs(arrays), strict=True)
        for number, of_group in groupby(rows, itemgetter(0)):
            _, indices, outputs = zip(*of_group, strict=True)
            groups[number] = PausedGroup(prompts[indices[0]], outputs)
    return groups


def as_paused(group: EndedGroup, group_size: int) -> PausedGroup | None:
    """Return a group as the engine's outputs; None where it has none."""
    if isinstance(group, PausedGroup):
        return group if group.outputs else None
    samples = {sample.index: sample for sample in group.samples}
    outputs = [as_output(samples[i]) if i in samples else EngineOutput((), (), (), False) for i in range(group_size)]
    return PausedGroup(group.prompt, tuple(outputs)) if samples else None


def as_output(sample: Sample) -> EngineOutput:
    """Return what the engine gave for a sample."""
    versions, experts = sample.weight_versions, sample.routed_experts
    return EngineOutput(sample.tokens, sample.rollout_logprobs, versions, sample.truncated, routed_experts=experts)


def _outputs(arrays: Mapping[str, ExpertIds]) -> Iterator[EngineOutput]:
    tokens, logprobs, versions = (arrays[name].tolist() for name in ("tokens", "logprobs", "weight_versions"))
    ends = list(accumulate(arrays["length"].tolist()))
    for place, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        yield EngineOutput(
            tuple(tokens[start:end]),
            tuple(logprobs[start:end]),
            tuple(versions[start:end]),
            truncated=bool(arrays["truncated"][place]),
            aborted=bool(arrays["aborted"][place]),
            cached_tokens=int(arrays["cached_tokens"][place]),
            routed_experts=arrays.get(f"routed_experts/{place}"),
        )
