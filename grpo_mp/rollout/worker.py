"""Generation on one engine: launches groups from the step's stream and scores finished groups in the meantime."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.data.template import answer_texts
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rewards.scorer import RewardStats, Scorer
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams, sampling_seed
from grpo_mp.rollout.concurrency import LaunchLimit
from grpo_mp.rollout.episodes import EpisodeGroup, EpisodeRunner, with_failures
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
LOAD_EVERY_S = 0.2  # interval of asking the engine for its load
LOOK_EVERY_S = 0.1  # interval of looking for groups that a lost engine gave back
SCORES = "scores"  # name of an asyncio task whose group is generated and is being scored


@dataclass(frozen=True)
class RolloutTask:
    """Work of one generation step, shared by all engines. Group i consists of `group_size` samples of `prompt_of(i)`.

    `carried`: this rank's groups carried over from earlier steps, by number; `carried_by_all`: numbers of the carried
    groups of all ranks. `routing`: shape of the model whose routed experts the samples record; None: no recording.
    """

    prompt_of: Callable[[int], Prompt]
    group_size: int
    first_group_id: int
    step: int
    sampling: SamplingParams
    keeps: Callable[[SampleGroup], bool] = lambda _: True  # the group filter: whether the step may train on a group
    carried: LaunchedGroups = field(default_factory=dict)
    carried_by_all: frozenset[int] = frozenset()
    lookahead: Callable[[], int] = lambda: 0  # number of groups of later steps that may be launched now
    # Maps the number of a later step's group to its token limit in this step; None: no limit.
    token_limit: Callable[[int], int] | None = None
    pauses: bool = True  # pause unfinished groups once the step has enough groups; otherwise they keep running
    stopped: Callable[[], bool] = lambda: False  # whether the job is shutting down, which pauses all groups
    routing: ModelShape | None = None
    seed: int | None = None  # sampling seed of the step, for deterministic engines only
    # Called with (group id, finished or paused group, statistics of its scoring).
    record: Callable[[int, EndedGroup, RewardStats], None] = lambda *_: None
    # Called with (group id, group of one sample) for each episode that ends before the rest of its group.
    record_part: Callable[[int, PausedGroup], object] = lambda *_: None
    forgets: bool = False  # drop the samples of a recorded group from memory
    # Returns the recorded part of a group that a lost engine gave back; None: the group starts from scratch.
    recall: Callable[[int, Prompt], PausedGroup | None] = lambda *_: None
    after_loss: bool = False  # whether an engine was lost in the last step

    def sampling_of(self, prompt: Prompt) -> SamplingParams:
        """Return the sampling parameters of a prompt's group; its seeds depend only on the prompt and its epoch."""
        if self.seed is None:
            return self.sampling
        seeds = (sampling_seed(self.seed, prompt.index, prompt.epoch, index) for index in range(self.group_size))
        return replace(self.sampling, seeds=tuple(seeds))


Generate = Callable[[RolloutTask, int, Prompt, PausedGroup | None, int | None], Coroutine[Any, Any, EndedGroup]]


@dataclass(frozen=True)
class RolloutWorker:
    """Generates and scores groups on one engine."""

    client: EngineClient
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    group_timeout_s: float
    lose_engine: Callable[[EngineError], None]  # marks the engine as lost; raises if it must not restart
    episodes: EpisodeRunner | None = None  # None: a rollout is a single response
    step_tokens: int = 1  # maximum number of tokens that one decode step adds to a response
    limit: LaunchLimit | None = None  # None: only `max_in_flight` limits the groups in flight

    async def run(self, task: RolloutTask, stream: GroupStream, max_in_flight: int) -> LaunchedGroups:
        """Generate until the step has enough groups; return all launched groups: finished, paused and running.

        `max_in_flight`: most concurrent groups, beside those of `limit`. An error in a reward cancels the other groups.
        """
        groups = _Groups(task, stream, self.step_tokens)
        gate = LaunchGate(stream, task.lookahead, task.stopped, task.token_limit is not None)
        watch = asyncio.create_task(gate.watch())
        looks = launch = None
        groups.most = max_in_flight
        try:
            if self.limit:
                await self._look(self.limit, groups, max_in_flight)
                looks = asyncio.create_task(self._keep_looking(self.limit, groups, max_in_flight))
            while not gate.done:
                for number in groups.take_waiting(gate):
                    groups.start(number, self._generate_group, gate)
                if launch is None and len(groups.running) < groups.most:
                    launch = asyncio.create_task(gate.when_allowed(groups.claim()))
                awaited = {watch, *groups.running, *filter(None, [launch])}
                await asyncio.wait(awaited, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    watch.result()
                groups.take_finished()
                if launch and launch.done():
                    allowed = launch.result()
                    launch = None
                    if allowed is not None:
                        groups.start(allowed, self._generate_group, gate)
            # Abort repeatedly, because a request may reach the engine after an abort.
            while (task.pauses or task.stopped()) and groups.running:
                if self.episodes:
                    self.episodes.pause.set()
                await self.client.abort_all()
                await asyncio.wait(groups.running, timeout=ABORT_EVERY_S)
                groups.take_finished()
        except EngineError as error:
            await groups.finish_scoring()
            groups.give_back()
            await asyncio.to_thread(self.lose_engine, error)
            await watch  # the other engines may take over the groups that this rank gave back
        except BaseException:
            groups.cancel()
            raise
        finally:
            for other in filter(None, (watch, looks, launch)):
                other.cancel()
        return groups.launched()

    async def _look(self, limit: LaunchLimit, groups: "_Groups", max_in_flight: int) -> None:
        groups.most = min(max_in_flight, await limit.look(len(groups.running), groups.size))

    async def _keep_looking(self, limit: LaunchLimit, groups: "_Groups", max_in_flight: int) -> None:
        while True:
            await asyncio.sleep(LOAD_EVERY_S)
            await self._look(limit, groups, max_in_flight)

    async def _generate_group(
        self, task: RolloutTask, group_id: int, prompt: Prompt, earlier: PausedGroup | None, tokens: int | None
    ) -> EndedGroup:
        """Generate a group, or the rest of the paused group `earlier`, and score it.

        A group that exceeds its time limit is returned unfinished and unscored. `tokens`: length [tokens] at which
        responses are paused; None: no limit.
        """
        try:
            group = await self._answer(task, group_id, prompt=prompt, earlier=earlier, tokens=tokens)
        except TimeoutError:
            await self.client.check_health()
            LOGGER.warning(
                "engine %d: prompt %d took longer than rollout.group_timeout_s=%g s: its group is aborted",
                *(self.client.index, prompt.index, self.group_timeout_s),
            )
            return as_unfinished(earlier or PausedGroup(prompt, ()), group_id)  # keeps the tokens of earlier steps
        if isinstance(group, PausedGroup):
            await asyncio.to_thread(task.record, group_id, group, RewardStats())
            return group
        if generation := asyncio.current_task():
            generation.set_name(SCORES)
        return await asyncio.to_thread(self._score, task, group_id, group)

    def _score(self, task: RolloutTask, group_id: int, group: SampleGroup) -> SampleGroup:
        """Score a finished group and record it; return it without samples if `task.forgets`."""
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
        """Generate a group without scoring it. Raises TimeoutError. Interrupted episodes restart from their prompt."""
        sampling = task.sampling_of(prompt)
        if self.episodes:

            def record(sample: Sample) -> None:
                task.record_part(group_id, PausedGroup(prompt, samples=(sample,)))

            group = EpisodeGroup(prompt, group_id, task.group_size, task.step, sampling, task.routing)
            samples = await self.episodes.run_group(group, earlier.samples if earlier else (), record)
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
        texts = answer_texts(self.tokenizer, [output.tokens for output in outputs])
        return SampleGroup(prompt, make_samples(prompt, outputs, texts, group_id))

    async def _resume(
        self, group: PausedGroup, sampling: SamplingParams, routing: ModelShape | None, tokens: int | None
    ) -> list[EngineOutput]:
        """Continue each unfinished response of a paused group; return all responses.

        `tokens`: length [tokens] at which responses are paused again; None: no limit.
        """
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
        """Mark an unfinished response as aborted and drop the tokens of its last decode step, so that it can resume.

        `to_its_end`: the request had the full token limit, so a truncated response is finished.
        """
        paused = output.aborted or (output.truncated and not to_its_end)
        kept = output.without_last_step(self.step_tokens) if paused else output
        return replace(kept, aborted=True, truncated=False) if paused else kept


async def pause_running(
    client: EngineClient, launched: LaunchedGroups, episodes: asyncio.Event | None = None
) -> dict[int, EndedGroup]:
    """Pause the running groups and return all groups except failed ones.

    `episodes`: the pause event of the EpisodeRunner.
    """
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
    """Give the unfinished groups of a lost engine to other engines; return its finished groups, scored.

    Must run in the event loop of the groups.
    """
    groups = _Groups(task, stream, 1)
    await groups.finish_scoring()
    groups.give_back()
    return groups.launched()


class _Groups:
    """Bookkeeping of one engine's groups in one step: claimed, running, waiting and ended groups."""

    def __init__(self, task: RolloutTask, stream: GroupStream, step_tokens: int) -> None:
        self._task = task
        self._stream = stream
        self._step_tokens = step_tokens
        self.size = task.group_size
        self.most = 1  # groups that may run
        self.running: dict[asyncio.Task[EndedGroup], int] = {}
        self._claimed = set[int]()  # claimed but not launched yet
        self._ended: dict[int, EndedGroup] = {}
        self._waiting = set[int]()  # to be launched: paused groups, and groups given back by a lost engine
        self._returned = set[int]()  # given back by a lost engine
        for number, group in sorted(task.carried.items()):
            if not isinstance(group, RunningGroup):
                self._end(number, group)
            elif group.task.done() and isinstance(group.task.exception(), EngineError):
                stream.give_back([number])  # the engine was lost and has restarted
            else:
                self.running[group.task] = number

    def take_waiting(self, gate: LaunchGate) -> list[int]:
        """Remove and return the waiting groups that can be launched now; claim returned groups for free slots."""
        places = max(0, self.most - len(self.running))
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
        """Claim the next group number that no rank has carried over; the gate decides when it is launched."""
        while (number := self._stream.claim()) in self._task.carried_by_all:
            pass
        self._claimed.add(number)
        return number

    def start(self, number: int, generate: Generate, gate: LaunchGate) -> None:
        """Launch a group, or resume it if it is paused. Groups of later steps stop at their token limit."""
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
        """Resume a lost engine's group from the journal, so that its tokens are not drawn again by newer weights."""
        recorded = await asyncio.to_thread(self._task.recall, self._task.first_group_id + number, prompt)
        return await begin(recorded, limit)

    def take_finished(self) -> None:
        """Move groups whose task is done from running to ended; re-raise the exception of a failed group."""
        for generation in [generation for generation in self.running if generation.done()]:
            group = generation.result()
            self._end(self.running.pop(generation), group)

    async def finish_scoring(self) -> None:
        """Wait for the groups that are being scored; move these and all finished groups from running to ended."""
        scoring = [generation for generation in self.running if generation.get_name() == SCORES]
        if scoring:
            await asyncio.wait(scoring)
        for generation in [task for task in self.running if task in scoring or _has_finished(task)]:
            number = self.running.pop(generation)
            self._end(number, generation.result())

    def launched(self) -> LaunchedGroups:
        return self._ended | {number: RunningGroup(generation) for generation, number in self.running.items()}

    def give_back(self) -> None:
        """Give unfinished groups to other engines and report this engine as lost."""
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
        """Return whether all responses of a paused group have finished or reached the token limit of this step."""
        group = self._ended.get(number)
        if self._task.token_limit is None or not isinstance(group, PausedGroup) or not group.outputs:
            return False
        limit = self._task.token_limit(number)
        return all(output.has(limit, self._step_tokens) for output in group.outputs if output.aborted)


def _has_finished(generation: asyncio.Task[EndedGroup]) -> bool:
    if not generation.done() or generation.cancelled() or generation.exception():
        return False
    return isinstance(generation.result(), SampleGroup)
