"""A process reward model behind HTTP: an SGLang server with a reward head scores each step of a response.

A causal model's score at the end of a step depends on nothing after it: it is the score of the response cut there.
"""

from collections.abc import Callable, Sequence
from functools import cache

from grpo_mp.rewards.model import ModelClient
from grpo_mp.rewards.settings import StepModelConfig
from grpo_mp.rewards.timeouts import RewardError
from grpo_mp.types import SampleGroup

Decode = Callable[[list[int]], str]


class StepModelClient:
    """Client of one server. Thread-safe."""

    def __init__(self, settings: StepModelConfig, decode: Decode) -> None:
        """Take `decode`, the policy's tokenizer. Opens no connection. Raises UserError where the key is not set."""
        self._model = ModelClient(settings)
        self._separator = settings.separator
        self._decode_token = cache(lambda token: decode([token]))

    def close(self) -> None:
        """Close the connections."""
        self._model.close()

    def score_steps(self, group: SampleGroup) -> list[list[tuple[int, float]]]:
        """Score every step of every sample: (index of the step's last token, score). Raises RewardError."""
        ends = [
            step_ends([self._decode_token(token) for token in sample.tokens], self._separator)
            for sample in group.samples
        ]
        prefixes = [
            [*sample.prompt_tokens, *sample.tokens[: end + 1]]
            for sample, sample_ends in zip(group.samples, ends, strict=True)
            for end in sample_ends
        ]
        scores = self._model.scores(prefixes)
        if len(scores) != len(prefixes):
            raise RewardError(f"the model of steps answered {len(scores)} scores for {len(prefixes)} steps")
        remaining = iter(scores)
        return [[(end, next(remaining)) for end in sample_ends] for sample_ends in ends]


def step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    """Find the last token of each step: the one that completes the separator, and the response's last.

    `pieces` are the texts of the tokens. Blank steps end with the one before them.
    """
    ends: list[int] = []
    text = ""
    for index, piece in enumerate(pieces):
        text += piece
        if separator in text and text.strip():
            ends.append(index)
            text = ""
    if text.strip() or not ends:
        ends.append(len(pieces) - 1)
    return ends
