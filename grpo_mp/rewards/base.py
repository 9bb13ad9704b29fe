"""Reward functions, how they are loaded and called: the convention of TRL's `reward_funcs`."""

import asyncio
import inspect
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from grpo_mp.registry import Registry
from grpo_mp.types import SampleGroup

RESERVED = ("prompt", "completion", "completion_ids")  # columns that are not passed on


class Reward(Protocol):
    """A user's reward: one value per completion, None where it does not apply. It may also be a coroutine function.

    Keywords: `prompts` and `completions` as text, or as message lists where the prompt column holds messages;
    `completion_ids`; every data column as a list; `trainer_state`; the callbacks `log_extra` (a column of the sample
    files, one value per completion) and `log_metric` (a number whose mean over the step becomes a metric).
    """

    def __call__(
        self, prompts: list[Any], completions: list[Any], **columns: Any
    ) -> Sequence[float | None] | Coroutine[Any, Any, Sequence[float | None]]: ...


class StepReward(Protocol):
    """A user's rewards of single steps, called with the keywords of a `Reward`. It may also be a coroutine function.

    Returns for each completion its (end, reward) pairs: `end` is the index, into `completion_ids`, of the last token
    of the step; ends ascend strictly.
    """

    def __call__(
        self, prompts: list[Any], completions: list[Any], **columns: Any
    ) -> Sequence[Sequence[tuple[int, float]]] | Coroutine[Any, Any, Sequence[Sequence[tuple[int, float]]]]: ...


def call_arguments(group: SampleGroup, prompt_column: str, **others: Any) -> dict[str, Any]:
    """Build the keyword arguments for one group: prompt and columns, repeated for every completion, and `others`."""
    count = len(group.samples)
    row = group.prompt.columns
    prompt = row.get(prompt_column, group.prompt.text)
    texts = [sample.text for sample in group.samples]
    is_chat = not isinstance(prompt, str)
    return {
        **{name: [value] * count for name, value in row.items() if name not in RESERVED},
        **others,
        "prompts": [prompt] * count,
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
        "completion_ids": [list(sample.tokens) for sample in group.samples],
    }


def call_reward(reward: Reward, arguments: dict[str, Any]) -> list[float | None]:
    """Call a reward function and await its coroutine. Raises what it raises, TypeError where it returns no list."""
    return [None if value is None else float(value) for value in call_user(reward, arguments)]


def call_user(function: Reward | StepReward, arguments: dict[str, Any]) -> Any:
    """Return what the function, or the coroutine that it returns, gives. Raises what it raises."""
    returned = function(**arguments)
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
REWARDS: Registry[Reward] = Registry("reward function", keywords=KEYWORDS)
STEP_REWARDS: Registry[StepReward] = Registry("reward function of steps", keywords=KEYWORDS)
