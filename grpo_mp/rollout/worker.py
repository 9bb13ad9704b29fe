"""Generation on one engine: launch groups from the step's stream, score each while others are generated."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rewards.scorer import RewardStats, Scorer
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams, sampling_seed
from grpo_mp.rollout.episodes import EpisodeRunner, with_failures
from grpo_mp.rollout.groups import (
    EndedGroup,
    LaunchedGroups,
    PausedGroup,
    RunningGroup,
    as_unfinished,
    joined,
    make_samples,
)
from grpo_mp.rollout.routed_experts import known_tokens
from grpo_mp.rollout.stream import GroupStream, LaunchGate
from grpo_mp.utils.errors import EngineError
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

LOGGER = logging.getLogger(__name__)
ABORT_EVERY_S = 0.5
LOOK_EVERY_S = 0.1  # for groups that a lost engine gave back
SCORES = "scores"  # name of a task whose generation is finished


@dataclass(frozen=True)
class RolloutTask:
    """The rollout of one step, shared by all engines. Group i is `group_size` samples of `prompt_of(i)`.

    `carried`: this rank's groups from earlier steps; `carried_by_all`: the numbers of carried groups of all ranks.
    `routing`: shape of the model whose expert choices the samples record; None: they are not recorded.
    """

    prompt_of: Callable[[int], Prompt]
    group_size: int
    first_group_id: int
    step: int
    sampling: SamplingParams
    keeps: Callable[[SampleGroup], bool] = lambda _: True  # the group filter
    carried: LaunchedGroups = field(default_factory=dict)
    carried_by_all: frozenset[int] = frozenset()
    lookahead: Callable[[], int] = lambda: 0  # groups of later steps that may be launched now
    # Token limit of a later step's group in this step, by its number; None: no limit.
    token_limit: Callable[[int], int] | None = None
    pauses: bool = True  # pause unfinished groups when the step has its groups; otherwise they keep running
    stopped: Callable[[], bool] = lambda: False  # whether the job ends, which pauses all groups
    routing: ModelShape | None = None
    seed: int | None = None  # of deterministic engines
    # Called with each ended group, its id and the statistics of its scoring.
    record: Callable[[int, EndedGroup, RewardStats], None] = lambda *_: None
    # Called with each episode that ends before its group, as a group with this one sample.
    record_part: Callable[[int, PausedGroup], object] = lambda *_: None
    forgets: bool = False  # drop the samples of a recorded group from memory
    # Returns what was recorded of a group that a lost engine gave back; None: the group begins anew.
    recall: Callable[[int, Prompt], PausedGroup | None] = lambda *_: None
    after_loss: bool = False  # an engine was lost in the last step

    def sampling_of(self, prompt: Prompt) -> SamplingParams:
        """Return a group's sampling parameters; its seeds depend neither on the engine nor on the time."""
        if self.seed is None:
            return self.sampling
        seeds = (sampling_seed(self.seed, prompt.index, prompt.epoch, index) for index in range(self.group_size))
        return replace(self.sampling, seeds=tuple(seeds))


Generate = Callable[[RolloutTask, int, Prompt, PausedGroup | None, int | None], Coroutine[Any, Any, EndedGroup]]


@dataclass(frozen=True)
class RolloutWorker:
    """Drives one engine."""

    client: EngineClient
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    group_timeout_s: float
    lose_engine: Callable[[EngineError], None]  # raises where the engine may not restart
    episodes: EpisodeRunner | None = None  # None: a rollout is one answer
    step_tokens: int = 1  # most tokens that the engine adds to a response at once

    async def run(self, task: RolloutTask, stream: GroupStream, max_in_flight: int) -> LaunchedGroups:
        """Launch groups until the step has its groups, at most `max_in_flight` at a time; return all launched groups.

        An error of a reward drops the other groups.
        """
        groups = _Groups(task, stream, self.step_tokens)
        gate = LaunchGate(stream, task.lookahead, task.stopped, task.token_limit is not None)
        watch, launch = asyncio.create_task(gate.watch()), None
        try:
            while not gate.done:
                for number in groups.take_waiting(gate, max_in_flight):
                    groups.start(number, self._generate_group, gate)
                if launch is None and len(groups.running) < max_in_flight:
                    launch = asyncio.create_task(_when_allowed(gate, groups.claim()))
                awaited = {watch, *groups.running, *filter(None, [launch])}
                await asyncio.wait(awaited, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    watch.result()
                groups.take_finished()
                if launch and launch.done():
                    allowed, launch = launch.result(), None
                    if allowed is not None:
                        groups.start(allowed, self._generate_group, gate)
            while (task.pauses or task.stopped()) and groups.running:  # again: a request may have been on its way
                if self.episodes:
                    self.episodes.pause.set()
                await self.client.abort_all()
                await asyncio.wait(groups.running, timeout=ABORT_EVERY_S)
                groups.take_finished()
        except EngineError as error:
            await groups.finish_scoring()
            groups.give_back()
            await asyncio.to_thread(self.lose_engine, error)
            await watch  # the other engines may need what this rank has
        except BaseException:
            groups.cancel()
            raise
        finally:
            for other in filter(None, (watch, launch)):
                other.cancel()
        return groups.launched()

    async def _generate_group(
        self, task: RolloutTask, group_id: int, prompt: Prompt, earlier: PausedGroup | None, tokens: int | None
    ) -> EndedGroup:
        """Generate a group, or the rest of a paused group, and score it. After its time limit it is unfinished.

        `tokens`: token limit after which responses are paused.
        """
        try:
            group = await self._answer(task, group_id, prompt=prompt, earlier=earlier, tokens=tokens)
        except TimeoutError:
            await self.client.check_health()
            LOGGER.warning(
                "engine %d: prompt %d took longer than rollout.group_timeout_s=%g s: its group is aborted",
                *(self.client.index, prompt.index, self.group_timeout_s),
            )
            return as_unfinished(earlier or PausedGroup(prompt, ()), group_id)  # what it has from steps before
        if isinstance(group, PausedGroup):
            await asyncio.to_thread(task.record, group_id, group, RewardStats())
            return group
        if generation := asyncio.current_task():
            generation.set_name(SCORES)
        return await asyncio.to_thread(self._score, task, group_id, group)

    def _score(self, task: RolloutTask, group_id: int, group: SampleGroup) -> SampleGroup:
        scorer = self.scorer.with_own_stats()
        scored = scorer.score_group(group, task.step)
        if self.episodes and not scorer.defers:
            scored = with_failures(scored, self.episodes.parts.config.failed)
        task.record(group_id, scored, scorer.take_stats())
        return replace(scored, samples=()) if task.forgets else scored

    async def _answer(
        self,
        task: RolloutTask,
        group_id: int,
        prompt: Prompt,
        earlier: PausedGroup | None,
        tokens: int | None = None,
    ) -> EndedGroup:
        """Generate a group without scoring it; interrupted episodes begin anew. Raises TimeoutError."""
        sampling = task.sampling_of(prompt)
        if self.episodes:

            def record(sample: Sample) -> None:
                task.record_part(group_id, PausedGroup(prompt, samples=(sample,)))

            of_group = (prompt, group_id, task.group_size, task.step, sampling, task.routing)
            samples = await self.episodes.run_group(*of_group, earlier.samples if earlier else (), record)
            if len(samples) < task.group_size:
                return PausedGroup(prompt, samples=samples)
            return SampleGroup(prompt, samples)
        async with asyncio.timeout(self.group_timeout_s):
            if earlier:
                outputs = await self._resume(earlier, sampling, task.routing, tokens)
            else:
                part = sampling.up_to(tokens)
                outputs = await self.client.generate(prompt.tokens, part, task.group_size, task.routing)
                outputs = [self._pausable(output, part == sampling) for output in outputs]
        if any(output.aborted for output in outputs):
            return PausedGroup(prompt, tuple(outputs))
        texts = self.tokenizer.batch_decode([output.tokens for output in outputs], skip_special_tokens=True)
        return SampleGroup(prompt, make_samples(prompt, outputs, texts, group_id))

    async def _resume(
        self, group: PausedGroup, sampling: SamplingParams, routing: ModelShape | None, tokens: int | None
    ) -> list[EngineOutput]:
        """Generate the rest of each unfinished response, after the tokens that it has, or up to `tokens`."""
        part = sampling.up_to(tokens)

        async def rest(index: int, output: EngineOutput) -> EngineOutput:
            left = part.max_response_tokens - len(output.tokens)
            own = replace(part.only(index), max_response_tokens=left)
            so_far = (*group.prompt.tokens, *output.tokens)
            known = known_tokens(output.routed_experts, len(output.tokens))
            (more,) = await self.client.generate(so_far, own, 1, routing, known)
            return joined(output, self._pausable(more, part == sampling))

        unfinished = [
            (index, output)
            for index, output in enumerate(group.outputs)
            if output.aborted and not output.has(tokens, self.step_tokens)
        ]
        resumed = await asyncio.gather(*(rest(*item) for item in unfinished))
        changed = {index: output for (index, _), output in zip(unfinished, resumed, strict=True)}
        return [changed.get(index, output) for index, output in enumerate(group.outputs)]

    def _pausable(self, output: EngineOutput, to_its_end: bool) -> EngineOutput:
        """Return what the engine answered so that it can go on where it is not finished."""
        paused = output.aborted or (output.truncated and not to_its_end)
        kept = output.without_last_step(self.step_tokens) if paused else output
        return replace(kept, aborted=True, truncated=False) if paused else kept


async def pause_running(
    client: EngineClient, launched: LaunchedGroups, episodes: asyncio.Event | None = None
) -> dict[int, EndedGroup]:
    """Pause the running groups; return all groups but failed ones. `episodes`: the event that ends episodes."""
    tasks = {number: group.task for number, group in launched.items() if isinstance(group, RunningGroup)}
    waiting = set(tasks.values())
    while waiting:
        if episodes:
            episodes.set()
        await client.abort_all()
        _, waiting = await asyncio.wait(waiting, timeout=ABORT_EVERY_S)
    ended = {number: group for number, group in launched.items() if not isinstance(group, RunningGroup)}
    return ended | {number: task.result() for number, task in tasks.items() if not task.exception()}


async def give_back(task: RolloutTask, stream: GroupStream) -> LaunchedGroups:
    """Give the groups of a lost engine to other engines; return those that are finished, or wait for their scores.

    It must run in the event loop of the groups.
    """
    groups = _Groups(task, stream, 1)
    await groups.finish_scoring()
    groups.give_back()
    return groups.launched()


class _Groups:
    """The groups of one engine in one step: claimed, running, waiting and ended ones."""

    def __init__(self, task: RolloutTask, stream: GroupStream, step_tokens: int) -> None:
        self._task, self._stream, self._step_tokens = task, stream, step_tokens
        self.running: dict[asyncio.Task[EndedGroup], int] = {}
        self._claimed = set[int]()  # not launched yet
        self._ended: dict[int, EndedGroup] = {}
        self._waiting = set[int]()  # paused, or given back by a lost engine
        self._returned = set[int]()  # given back by a lost engine
        for number, group in sorted(task.carried.items()):
            if not isinstance(group, RunningGroup):
                self._end(number, group)
            elif group.task.done() and isinstance(group.task.exception(), EngineError):
                stream.give_back([number])  # the engine was lost and has restarted
            else:
                self.running[group.task] = number

    def take_waiting(self, gate: LaunchGate, max_in_flight: int) -> list[int]:
        """Return as many paused or given back groups as can be launched now."""
        places = max(0, max_in_flight - len(self.running))
        while len(allowed := self._allowed(gate)) < places and (returned := self._stream.take_returned()) is not None:
            self._waiting.add(returned)
            self._returned.add(returned)
        self._waiting.difference_update(allowed[:places])
        return allowed[:places]

    def _allowed(self, gate: LaunchGate) -> list[int]:
        return [
            number
            for number in sorted(self._waiting)
            if gate.allows(number) and (gate.is_own(number) or not self._has_its_tokens(number))
        ]

    def claim(self) -> int:
        """Claim a new group, to be launched when the gate allows it."""
        while (number := self._stream.claim()) in self._task.carried_by_all:
            pass
        self._claimed.add(number)
        return number

    def start(self, number: int, generate: Generate, gate: LaunchGate) -> None:
        """Launch a group; groups of later steps stop at their token limit."""
        self._claimed.discard(number)
        earlier = self._ended.get(number)
        paused = earlier if isinstance(earlier, PausedGroup) else None
        prompt = paused.prompt if paused else self._task.prompt_of(number)
        limit = None if gate.is_own(number) or not self._task.token_limit else self._task.token_limit(number)
        begin = partial(generate, self._task, self._task.first_group_id + number, prompt)
        recalls = (number in self._returned or self._task.after_loss) and not paused
        generation = self._recalled(number, prompt, begin, limit) if recalls else begin(paused, limit)
        self.running[asyncio.create_task(generation)] = number

    async def _recalled(
        self,
        number: int,
        prompt: Prompt,
        begin: Callable[[PausedGroup | None, int | None], Coroutine[Any, Any, EndedGroup]],
        limit: int | None,
    ) -> EndedGroup:
        """Continue from the record of a lost engine's group: newer weights must not draw its tokens again."""
        recorded = await asyncio.to_thread(self._task.recall, self._task.first_group_id + number, prompt)
        return await begin(recorded, limit)

    def take_finished(self) -> None:
        """Move ended groups out of the running ones; raise their errors."""
        for generation in [generation for generation in self.running if generation.done()]:
            group = generation.result()
            self._end(self.running.pop(generation), group)

    async def finish_scoring(self) -> None:
        """Keep the groups of a lost engine that are finished or only wait for their scores."""
        scoring = [generation for generation in self.running if generation.get_name() == SCORES]
        if scoring:
            await asyncio.wait(scoring)
        for generation in [task for task in self.running if task in scoring or _has_finished(task)]:
            number = self.running.pop(generation)
            self._end(number, generation.result())

    def launched(self) -> LaunchedGroups:
        return self._ended | {number: RunningGroup(generation) for generation, number in self.running.items()}

    def give_back(self) -> None:
        """Give unfinished groups to other engines."""
        self.cancel()
        unfinished = [number for number, group in self._ended.items() if isinstance(group, PausedGroup)]
        for number in unfinished:
            del self._ended[number]
        self._stream.give_back({*unfinished, *self.running.values(), *self._waiting, *self._claimed})
        self._stream.report_lost()
        self.running = {}

    def cancel(self) -> None:
        for generation in self.running:
            generation.cancel()

    def _end(self, number: int, group: EndedGroup) -> None:
        self._ended[number] = group
        if isinstance(group, SampleGroup):
            self._stream.report(number, self._task.keeps(group) if group.finished else None)
        else:
            self._waiting.add(number)
            if self._has_its_tokens(number):
                self._stream.report_ahead(number)

    def _has_its_tokens(self, number: int) -> bool:
        """Return whether a paused group has reached its token limit of this step."""
        group = self._ended.get(number)
        if self._task.token_limit is None or not isinstance(group, PausedGroup) or not group.outputs:
            return False
        limit = self._task.token_limit(number)
        return all(output.has(limit, self._step_tokens) for output in group.outputs if output.aborted)


def _has_finished(generation: asyncio.Task[EndedGroup]) -> bool:
    if not generation.done() or generation.cancelled() or generation.exception():
        return False
    return isinstance(generation.result(), SampleGroup)


async def _when_allowed(gate: LaunchGate, number: int) -> int | None:
    """Wait until a number may be launched and return it; None where the step is done before."""
    return number if await gate.may_launch(number) else None
