"""Groups of responses from an engine: finished, paused, running or timed out."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_mp.rollout.client import EngineOutput
from grpo_mp.rollout.routed_experts import joined_routed_experts
from grpo_mp.utils.types import KeptTokens, Prompt, Sample, SampleGroup


@dataclass(frozen=True)
class PausedGroup:
    """An unfinished group. Aborted `outputs` resume after their tokens.

    A group of episodes has only `samples`: the finished episodes; unfinished episodes restart from the prompt.
    """

    prompt: Prompt
    outputs: tuple[EngineOutput, ...] = ()
    samples: tuple[Sample, ...] = ()


EndedGroup = SampleGroup | PausedGroup


def oldest_version(group: EndedGroup, default: int) -> int:
    """Return the oldest weight version that generated a token of the group; `default` if the group has no token."""
    # Given tokens have no weight version of their own. A response starts with a generated token or has none at all.
    sequences = [sequence for sample in group.samples for sequence in sample.sequences]
    versions = [s.weight_versions for s in sequences if not s.generated or s.generated[0]]
    if isinstance(group, PausedGroup):
        versions += [output.weight_versions for output in group.outputs]
    return min((of_part[0] for of_part in versions if of_part), default=default)


@dataclass(frozen=True)
class RunningGroup:
    """A group that is still being generated after its step ended, and continues in the next step."""

    task: asyncio.Task[EndedGroup]


LaunchedGroups = Mapping[int, EndedGroup | RunningGroup]  # by number in the step's launch order


def make_samples(
    prompt: Prompt, outputs: Sequence[EngineOutput], texts: Sequence[str], group_id: int
) -> tuple[Sample, ...]:
    """Return samples for the outputs that have tokens, with their indices in the group."""
    return tuple(
        Sample(
            group_id=group_id,
            index=index,
            prompt_tokens=prompt.tokens,
            tokens=output.tokens,
            rollout_logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            truncated=output.truncated,
            routed_experts=output.routed_experts,
            kept=output.kept,
            verify_steps=output.verify_steps,
            text=text,
        )
        for index, (output, text) in enumerate(zip(outputs, texts, strict=True))
        if output.tokens
    )


def unanswered(prompt: Prompt, group_id: int, count: int, end_token: int) -> SampleGroup:
    """Return a group of `count` samples for a timed-out prompt; each response is one `end_token`, not generated."""
    sample = Sample(
        *(group_id, 0, prompt.tokens, (end_token,), (0.0,), (0,)),
        truncated=True,
        generated=(False,),
        state="timeout",
        error="it took longer than rollout.group_timeout_s",
    )
    return SampleGroup(prompt, tuple(replace(sample, index=index) for index in range(count)))


def as_unfinished(group: EndedGroup, group_id: int) -> SampleGroup:
    """Convert a paused group to a SampleGroup with `finished=False`, which is not scored; keep a SampleGroup."""
    if isinstance(group, SampleGroup):
        return group
    samples = make_samples(group.prompt, group.outputs, [""] * len(group.outputs), group_id)
    return SampleGroup(group.prompt, (*samples, *group.samples), finished=False)


def joined(output: EngineOutput, more: EngineOutput) -> EngineOutput:
    """Concatenate a paused response and its continuation `more`."""
    return replace(
        more,
        tokens=output.tokens + more.tokens,
        logprobs=output.logprobs + more.logprobs,
        weight_versions=output.weight_versions + more.weight_versions,
        verify_steps=output.verify_steps + more.verify_steps,
        cached_tokens=output.cached_tokens + more.cached_tokens,
        routed_experts=joined_routed_experts(
            *(output.routed_experts, more.routed_experts, len(output.tokens), len(more.tokens))
        ),
        kept=KeptTokens.joined([(one.kept, len(one.tokens)) for one in (output, more)]),
    )
