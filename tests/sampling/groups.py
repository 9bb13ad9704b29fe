"""Groups of answers that no engine gave."""

from typing import Any

from grpo_mp.utils.types import Prompt, Sample, SampleGroup

PROMPT = Prompt(3, "How many?", (5, 6), "7", {"level": 2}, ({"role": "user", "content": "How many?"},))


def answer(index: int, length: int = 2, prompt: Prompt = PROMPT, **values: Any) -> Sample:
    """An answer of so many tokens."""
    tokens = tuple(range(8, 8 + length))
    logprobs = tuple(-0.5 - number for number in range(length))
    return Sample(prompt.index, index, prompt.tokens, tokens, logprobs, (0,) * length, **{"truncated": False} | values)


def group_of(*samples: Sample, prompt: Prompt = PROMPT) -> SampleGroup:
    """A scored group."""
    return SampleGroup(prompt, samples)
