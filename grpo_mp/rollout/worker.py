"""Groups on one engine: pull a number, generate the group, score it while the others are still being generated."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from grpo_mp.errors import UserError
from grpo_mp.rewards.score import Scorer
from grpo_mp.rollout.client import EngineClient, Generated, Sampling
from grpo_mp.rollout.queue import WorkQueue
from grpo_mp.types import Prompt, Sample, SampleGroup

POLL_S = 0.02


@dataclass(frozen=True)
class RolloutTask:
    """What all engines work on together. Group i is `group_size` samples of `prompts[i]`."""

    prompts: Sequence[Prompt]
    group_size: int
    first_group_id: int
    step: int
    sampling: Sampling
    enough: int | None = None  # finished groups in the whole job, after which the others are broken off


class RolloutWorker:
    """Drives one engine. Groups come back complete, scored, in the order of their ids."""

    def __init__(
        self, client: EngineClient, scorer: Scorer, tokenizer: PreTrainedTokenizerBase, group_timeout_s: float
    ) -> None:
        self._client, self._scorer, self._tokenizer = client, scorer, tokenizer
        self._group_timeout_s = group_timeout_s

    async def run(self, task: RolloutTask, queue: WorkQueue, in_flight: int) -> list[SampleGroup]:
        """Work until the queue is empty, with at most `in_flight` groups at a time.

        Raises UserError from the engine or a reward; the other groups are dropped then.
        """
        groups: list[SampleGroup] = []
        done = asyncio.Event()

        async def lane() -> None:
            while not done.is_set() and (number := queue.next()) is not None:
                groups.append(await self._group(task, number, queue))

        async def all_lanes() -> None:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(in_flight):
                    lanes.create_task(lane())
            done.set()

        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(all_lanes())
                if task.enough is not None:
                    parts.create_task(self._break_off(task.enough, queue, done))
        except* Exception as several:
            raise _first(several) from several
        return sorted((group for group in groups if group.samples), key=lambda group: group.samples[0].group_id)

    async def _break_off(self, enough: int, queue: WorkQueue, done: asyncio.Event) -> None:
        """End what is in flight once the job has enough; every request then returns what it has."""
        while not done.is_set():
            if queue.finished() >= enough:
                done.set()
                await self._client.abort_all()
            await asyncio.sleep(POLL_S)

    async def _group(self, task: RolloutTask, number: int, queue: WorkQueue) -> SampleGroup:
        prompt = task.prompts[number]
        try:
            async with asyncio.timeout(self._group_timeout_s):
                answers = await self._client.generate(prompt.tokens, task.sampling, task.group_size)
        except TimeoutError as error:
            raise UserError(
                f"engine {self._client.index}: prompt {prompt.index} took longer than "
                f"rollout.group_timeout_s={self._group_timeout_s:g} s in GENERATE"
            ) from error
        texts = self._tokenizer.batch_decode([answer.tokens for answer in answers], skip_special_tokens=True)
        samples = tuple(
            _sample(prompt, answer, text, task.first_group_id + number, index)
            for index, (answer, text) in enumerate(zip(answers, texts, strict=True))
            if answer.tokens
        )
        if any(answer.aborted for answer in answers):
            return SampleGroup(prompt, samples, finished=0)
        scored = await asyncio.to_thread(self._scorer.score_group, SampleGroup(prompt, samples), task.step)
        return replace(scored, finished=queue.finish())


def _first(several: BaseExceptionGroup[Exception]) -> Exception:
    """The first error inside groups of groups."""
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _sample(prompt: Prompt, answer: Generated, text: str, group_id: int, index: int) -> Sample:
    return Sample(
        group_id=group_id,
        index=index,
        prompt_tokens=prompt.tokens,
        tokens=answer.tokens,
        rollout_logprobs=answer.logprobs,
        weight_versions=answer.weight_versions,
        truncated=answer.truncated,
        text=text,
    )
