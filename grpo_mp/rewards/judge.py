"""The judge: a model behind an OpenAI-compatible endpoint reads question, answer and reference, and writes a score."""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo_mp.rewards.base import RewardError, Values
from grpo_mp.rewards.reward_model import ServedModelClient
from grpo_mp.rewards.settings import JUDGE_FIELDS, JUDGE_TEMPLATE, LARGEST_SCORE, JudgeConfig
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

CONCURRENT_REQUESTS = 32  # per rank
PATH = "/chat/completions"
SCORE = re.compile(r"(?i)score[\s:*]*(-?\d+(?:\.\d+)?)")


class Judge(ServedModelClient):
    """Client of one judge. Thread-safe; at most CONCURRENT_REQUESTS requests are in flight per rank."""

    section = "reward.judge"
    wanted = "a chat completion with 'Score: N' from 0 to 10"

    def __init__(self, settings: JudgeConfig) -> None:
        super().__init__(settings)
        self._settings = settings
        self._threads = ThreadPoolExecutor(CONCURRENT_REQUESTS, "judge")

    def close(self) -> None:
        self._threads.shutdown()
        super().close()

    def values(self, group: SampleGroup) -> Values:
        """Return one value from 0 to 1 per sample; equal answers are judged once.

        Raises RewardError if a sample gets no score; the error carries the values of the other samples.
        """
        contents = [self._content(group.prompt, sample) for sample in group.samples]
        distinct = [*dict.fromkeys(contents)]
        verdicts = dict(zip(distinct, self._threads.map(self._ask, distinct), strict=True))
        results = [verdicts[content] for content in contents]
        scored = {i: result for i, result in enumerate(results) if isinstance(result, float)}
        for i, result in enumerate(results):
            if isinstance(result, RewardError):
                raise RewardError(f"{self._settings.model} at {result}", i, scored)
        return [*scored.values()]

    def _content(self, prompt: Prompt, sample: Sample) -> str:
        """Fill in the judge's template for one answer or episode."""
        fields = {
            "question": prompt.text,
            "answer": sample.text,
            "conversation": conversation(prompt, sample),
            "reference": prompt.answer or "(none)",
        }
        template = self._settings.template or JUDGE_TEMPLATE
        # One pass, so that braces in the inserted texts stay as they are.
        return JUDGE_FIELDS.sub(lambda match: fields[match[1]], template)

    def _ask(self, content: str) -> float | RewardError:
        messages = [{"role": "user", "content": content}]
        body = {**self._settings.request, "model": self._settings.model, "messages": messages}
        try:
            return self.ask(PATH, body, self._read)
        except RewardError as error:
            return error

    def _read(self, reply: Mapping[str, Any]) -> float:
        """Return the last score of a reply, scaled to [0, 1]. Raises ValueError or LookupError if there is none."""
        number = float(SCORE.findall(reply["choices"][0]["message"]["content"])[-1])
        if not 0 <= number <= LARGEST_SCORE:
            raise ValueError(f"{number} is out of range")
        return number / LARGEST_SCORE


def conversation(prompt: Prompt, sample: Sample) -> str:
    """Return the messages of prompt and episode as JSON, one per line, so that no text can pose as another message."""
    given = prompt.messages or ({"role": "user", "content": prompt.text},)
    answered = sample.messages or ({"role": "assistant", "content": sample.text},)
    return "\n".join(json.dumps(message, ensure_ascii=False, default=str) for message in (*given, *answered))
