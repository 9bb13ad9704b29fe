"""Generation on one engine: pull a group number, generate the group, score it while others are generated."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from grpo_mp.errors import UserError
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.types import Prompt, Sample, SampleGroup

POLL_S = 0.02


class WorkQueue:
    """Numbers 0 .. size-1, each given to exactly one caller in the job, so that fast engines take more."""

    def __init__(self, store: dist.Store, name: str, size: int) -> None:
        """Open the counter `name`, which must be new in the job: a counter is never reset."""
        self._store, self._key, self._size = store, f"queue/{name}", size

    def next(self) -> int | None:
        """Take the next number, or None when all are taken."""
        number = self._store.add(self._key, 1) - 1
        return number if number < self._size else None

    def mark_finished(self) -> int:
        """Count one group as finished; return its place in the order of finishing."""
        return int(self._store.add(f"{self._key}/finished", 1))

    def finished_count(self) -> int:
        """Count the groups that are finished in the job."""
        return int(self._store.add(f"{self._key}/finished", 0))


@dataclass(frozen=True)
class RolloutTask:
    """The rollout of one step, shared by all engines. Group i is `group_size` samples of `prompts[i]`."""

    prompts: Sequence[Prompt]
    group_size: int
    first_group_id: int
    step: int
    sampling: SamplingParams
    target_groups: int | None = None  # finished groups of the job, after which the others are aborted


@dataclass(frozen=True)
class RolloutWorker:
    """Drives one engine. Its groups are scored and sorted by id."""

    client: EngineClient
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    group_timeout_s: float

    async def run(self, task: RolloutTask, queue: WorkQueue, max_in_flight: int) -> list[SampleGroup]:
        """Generate groups until the queue is empty, with at most `max_in_flight` at a time.

        Raises UserError from the engine or a reward; the other groups are dropped then.
        """
        groups: list[SampleGroup] = []
        stop = asyncio.Event()

        async def consume() -> None:
            while not stop.is_set() and (number := queue.next()) is not None:
                groups.append(await self._generate_group(task, number, queue))

        async def consume_all() -> None:
            async with asyncio.TaskGroup() as consumers:
                for _ in range(max_in_flight):
                    consumers.create_task(consume())
            stop.set()

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(consume_all())
                if task.target_groups is not None:
                    tasks.create_task(self._abort_at_target(task.target_groups, queue, stop))
        except* Exception as errors:
            raise _first_error(errors) from errors
        return sorted((group for group in groups if group.samples), key=lambda group: group.samples[0].group_id)

    async def _abort_at_target(self, target_groups: int, queue: WorkQueue, stop: asyncio.Event) -> None:
        """Abort the requests in flight once `target_groups` are finished; each returns the tokens it has."""
        while not stop.is_set():
            if queue.finished_count() >= target_groups:
                stop.set()
                await self.client.abort_all()
            await asyncio.sleep(POLL_S)

    async def _generate_group(self, task: RolloutTask, number: int, queue: WorkQueue) -> SampleGroup:
        prompt = task.prompts[number]
        try:
            async with asyncio.timeout(self.group_timeout_s):
                outputs = await self.client.generate(prompt.tokens, task.sampling, task.group_size)
        except TimeoutError as error:
            raise UserError(
                f"engine {self.client.index}: prompt {prompt.index} took longer than "
                f"rollout.group_timeout_s={self.group_timeout_s:g} s in GENERATE"
            ) from error
        texts = self.tokenizer.batch_decode([output.tokens for output in outputs], skip_special_tokens=True)
        samples = tuple(
            Sample(
                group_id=task.first_group_id + number,
                index=index,
                prompt_tokens=prompt.tokens,
                tokens=output.tokens,
                rollout_logprobs=output.logprobs,
                weight_versions=output.weight_versions,
                truncated=output.truncated,
                text=text,
            )
            for index, (output, text) in enumerate(zip(outputs, texts, strict=True))
            if output.tokens
        )
        if any(output.aborted for output in outputs):
            return SampleGroup(prompt, samples, finish_order=0)
        scored = await asyncio.to_thread(self.scorer.score_group, SampleGroup(prompt, samples), task.step)
        return replace(scored, finish_order=queue.mark_finished())


def _first_error(errors: BaseExceptionGroup[Exception]) -> Exception:
    """Return the first error of nested groups."""
    first = errors.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first
