"""An engine for tests of the rollout: it takes as long as its responses are, and answers the same whoever asks."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.client import EngineOutput, SamplingParams
from grpo_mp.utils.types import SampleGroup

Lengths = dict[tuple[int, int], int]  # (prompt token, index in the group) -> tokens of the response


def draw_length(prompt: int, index: int, longest: int) -> int:
    """Long-tailed: most responses are short, some take the whole limit."""
    return min(longest, int(random.Random(f"{prompt}/{index}").lognormvariate(2.0, 1.0)) + 1)


def token_of(prompt: int, index: int, place: int) -> int:
    return 1000 * prompt + 37 * index + place


@dataclass
class FakeEngine:
    """Prompts are one token; a prompt's responses have indices 0, 1, ... `token_s`: time of a token.

    `generated`: tokens; of a response that was broken off all but the last, which is drawn again.
    """

    index: int = 0
    token_s: float = 1e-4
    version: int = 0
    generated: int = 0
    most_running: int = 0
    _running: int = 0
    _aborts: list[asyncio.Event] = field(default_factory=list)

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        count: int = 1,
        routing: None = None,
        routed_tokens: int = 0,
    ) -> list[EngineOutput]:
        prompt, *given = prompt_tokens
        # Those that are asked for alone go on with a response, which says whose it is.
        first = (given[0] - 1000 * prompt) // 37 if given else 0
        indices = [first] if given else list(range(count))
        return list(await asyncio.gather(*(self._respond(prompt, len(given), sampling, index) for index in indices)))

    async def _respond(self, prompt: int, given: int, sampling: SamplingParams, index: int) -> EngineOutput:
        left = sampling.max_response_tokens
        aborted = asyncio.Event()
        tokens = list[int]()
        length = draw_length(prompt, index, given + left)
        self._aborts.append(aborted)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        while given + len(tokens) < length and not (len(tokens) > 1 and aborted.is_set()):
            await asyncio.sleep(self.token_s)
            tokens.append(token_of(prompt, index, given + len(tokens)))
        self._running -= 1
        finished = given + len(tokens) >= length
        self.generated += len(tokens) - (not finished)
        count = len(tokens)
        return EngineOutput(
            tuple(tokens),
            tuple(-0.001 * token for token in tokens),
            (self.version,) * count,
            truncated=finished and length == given + left,
            aborted=not finished,
        )

    async def load(self) -> None:
        """Return None, as for an engine that reports no load."""

    async def check_health(self) -> None:
        """It is well."""

    async def abort_all(self) -> None:
        for event in self._aborts:
            event.set()
        self._aborts.clear()


class NoScores:
    """Scores nothing."""

    def score_group(self, group: SampleGroup, step: int) -> SampleGroup:
        return group

    def take_stats(self) -> RewardStats:
        return RewardStats()

    def with_own_stats(self) -> "NoScores":
        return self
