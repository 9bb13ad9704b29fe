"""Groups on one engine: pull a number, generate the group, score it while the others are still being generated."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_mp.errors import UserError
from grpo_mp.rewards.score import Scorer
from grpo_mp.rollout.client import EngineClient, Generated, Sampling
from grpo_mp.rollout.queue import WorkQueue
from grpo_mp.types import Prompt, Sample, SampleGroup


@dataclass(frozen=True)
class RolloutTask:
    """What all engines work on together. Group i is `group_size` samples of `prompts[i]`."""

    prompts: Sequence[Prompt]
    group_size: int
    first_group_id: int
    step: int
    sampling: Sampling


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

        async def lane() -> None:
            while (number := queue.next()) is not None:
                groups.append(await self._group(task, number))

        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(in_flight):
                    lanes.create_task(lane())
        except ExceptionGroup as several:
            raise several.exceptions[0] from several
        return sorted(groups, key=lambda group: group.samples[0].group_id)

    async def _group(self, task: RolloutTask, number: int) -> SampleGroup:
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
        )
        return await asyncio.to_thread(self._scorer.score_group, SampleGroup(prompt, samples), task.step)


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
