"""Generation on one engine: launch groups from the step's stream, score each while others are generated."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from grpo_mp.distributed.layout import ModelShape
from grpo_mp.errors import UserError
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.routed_experts import joined_routed_experts
from grpo_mp.rollout.stream import GroupStream, LaunchGate
from grpo_mp.types import Prompt, Sample, SampleGroup

ABORT_EVERY_S = 0.5


@dataclass(frozen=True)
class PausedGroup:
    """A group that is not finished: some of `outputs` are `aborted`, with the tokens that they have."""

    prompt: Prompt
    outputs: tuple[EngineOutput, ...]


LaunchedGroups = Mapping[int, SampleGroup | PausedGroup]  # by number in the step's launch order


@dataclass(frozen=True)
class RolloutTask:
    """The rollout of one step, shared by all engines. Group i is `group_size` samples of `prompt_of(i)`.

    `carried`: groups that this rank has from steps before; `carried_by_all`: the numbers of those of all ranks.
    `routing`: the shape of the model whose experts the samples keep; None: none are asked for.
    """

    prompt_of: Callable[[int], Prompt]
    group_size: int
    first_group_id: int
    step: int
    sampling: SamplingParams
    keeps: Callable[[SampleGroup], bool] = lambda _: True  # the group filter
    carried: LaunchedGroups = field(default_factory=dict)
    carried_by_all: frozenset[int] = frozenset()
    routing: ModelShape | None = None


@dataclass(frozen=True)
class RolloutWorker:
    """Drives one engine."""

    client: EngineClient
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    group_timeout_s: float

    async def run(self, task: RolloutTask, stream: GroupStream, max_in_flight: int) -> LaunchedGroups:
        """Launch groups until the step has its groups, at most `max_in_flight` at a time; return all that were.

        Those that are unfinished then are paused. Raises UserError from the engine or a reward; the other groups are
        dropped then.
        """
        groups: dict[int, SampleGroup | PausedGroup] = dict(task.carried)
        paused: list[int] = []
        for number, group in sorted(task.carried.items()):
            if isinstance(group, SampleGroup):
                stream.report(number, task.keeps(group))
            else:
                paused.append(number)
        gate = LaunchGate(stream)

        def next_number() -> int:
            while not paused:
                if (number := stream.claim()) not in task.carried_by_all:
                    return number
            return paused.pop(0)

        async def launch_groups() -> None:
            while not gate.done and await gate.may_launch(number := next_number()):
                groups[number] = await self._generate_group(task, number, groups.get(number), stream)

        async def launch_all() -> None:
            async with asyncio.TaskGroup() as slots:
                for _ in range(max_in_flight):
                    slots.create_task(launch_groups())

        try:
            async with asyncio.TaskGroup() as tasks:
                launches = tasks.create_task(launch_all())
                tasks.create_task(self._pause_at_end(gate, launches))
        except* Exception as errors:
            raise _first_error(errors) from errors
        return groups

    async def _pause_at_end(self, gate: LaunchGate, launches: "asyncio.Task[None]") -> None:
        """Abort the requests in flight once the step has its groups; each returns the tokens it has."""
        await gate.watch()
        while not launches.done():  # again: a request may have been on its way
            await self.client.abort_all()
            await asyncio.wait([launches], timeout=ABORT_EVERY_S)

    async def _generate_group(
        self, task: RolloutTask, number: int, earlier: SampleGroup | PausedGroup | None, stream: GroupStream
    ) -> SampleGroup | PausedGroup:
        """Generate a group, or the rest of a paused one, and score it."""
        prompt = earlier.prompt if earlier else task.prompt_of(number)
        try:
            async with asyncio.timeout(self.group_timeout_s):
                if isinstance(earlier, PausedGroup):
                    outputs = await self._resume(earlier, task)
                else:
                    outputs = await self.client.generate(prompt.tokens, task.sampling, task.group_size, task.routing)
        except TimeoutError as error:
            raise UserError(
                f"engine {self.client.index}: prompt {prompt.index} took longer than "
                f"rollout.group_timeout_s={self.group_timeout_s:g} s in GENERATE"
            ) from error
        if any(output.aborted for output in outputs):
            return PausedGroup(prompt, tuple(outputs))
        texts = self.tokenizer.batch_decode([output.tokens for output in outputs], skip_special_tokens=True)
        group = SampleGroup(prompt, make_samples(prompt, outputs, texts, task.first_group_id + number))
        scored = await asyncio.to_thread(self.scorer.score_group, group, task.step)
        stream.report(number, task.keeps(scored))
        return scored

    async def _resume(self, group: PausedGroup, task: RolloutTask) -> list[EngineOutput]:
        """Generate the rest of each unfinished response, after the tokens that it has."""

        async def rest(output: EngineOutput) -> EngineOutput:
            left = task.sampling.max_response_tokens - len(output.tokens)
            sampling = replace(task.sampling, max_response_tokens=left)
            tokens = (*group.prompt.tokens, *output.tokens)
            (more,) = await self.client.generate(tokens, sampling, routing=task.routing)
            return joined(output, more)

        async with asyncio.TaskGroup() as tasks:
            resumed = [tasks.create_task(rest(output)) if output.aborted else None for output in group.outputs]
        return [task.result() if task else output for task, output in zip(resumed, group.outputs, strict=True)]


def make_samples(
    prompt: Prompt, outputs: Sequence[EngineOutput], texts: Sequence[str], group_id: int
) -> tuple[Sample, ...]:
    """Make samples of outputs; those without a token are left out."""
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
            text=text,
        )
        for index, (output, text) in enumerate(zip(outputs, texts, strict=True))
        if output.tokens
    )


def as_unfinished(group: SampleGroup | PausedGroup, group_id: int) -> SampleGroup:
    """Return a paused group as one that is not scored; a finished one as it is."""
    if isinstance(group, SampleGroup):
        return group
    samples = make_samples(group.prompt, group.outputs, [""] * len(group.outputs), group_id)
    return SampleGroup(group.prompt, samples, finished=False)


def joined(output: EngineOutput, more: EngineOutput) -> EngineOutput:
    """Return a response with what was generated after it; every token keeps its logprob, weight version and experts."""
    return replace(
        more,
        tokens=output.tokens + more.tokens,
        logprobs=output.logprobs + more.logprobs,
        weight_versions=output.weight_versions + more.weight_versions,
        cached_tokens=output.cached_tokens + more.cached_tokens,
        routed_experts=joined_routed_experts(output.routed_experts, more.routed_experts, bool(output.tokens)),
    )


def _first_error(errors: BaseExceptionGroup[Exception]) -> Exception:
    """Return the first error of nested groups."""
    first = errors.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first
