"""Reward functions, how they are loaded, called in limited time and checked: the convention of TRL's `reward_funcs`."""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from grpo_mp.utils.errors import one_line
from grpo_mp.utils.reading import has_column, read_column, shorten
from grpo_mp.utils.registry import Registry
from grpo_mp.utils.types import SampleGroup, StepRewards
from grpo_mp.utils.user_code import is_path, load_attribute, no_exit, without_exit

OTHERS = ("completion_ids", "trainer_state", "log_extra", "log_metric")  # arguments beside prompts and completions
RESERVED = ("prompt", "completion", "completion_ids")  # columns that are not passed on
USAGE = (
    "write def reward(prompts, completions, **columns), or def reward(prompt, completion, **columns), which is called "
    "for each answer"
)
Values = list[float | None]  # one per sample; None: the reward does not apply
T = TypeVar("T")


class RewardError(Exception):
    """A reward raised, timed out or returned something else than rewards.

    `sample`: index of the sample to show. `scored`: values of the samples that did not fail, by index.
    """

    def __init__(self, reason: str, sample: int = 0, scored: Mapping[int, float | None] | None = None) -> None:
        super().__init__(reason)
        self.sample, self.scored = sample, scored or {}


class Reward(Protocol):
    """A user's reward: one value per completion, None where it does not apply. It may also be a coroutine function.

    Keywords: `prompts` and `completions` as text, or as message lists where the prompt column holds messages;
    `completion_ids`; every data column as a list; `trainer_state`; the callbacks `log_extra` (a column of the sample
    files, one value per completion) and `log_metric` (a number whose mean over the step becomes a metric).

    A function with a parameter `completion` is called for each completion instead, with `prompt` and the value of every
    column for this one; its `log_extra` takes a column and its value. Coroutines of a group wait at the same time.

    A function of `reward.steps` has the same keywords, and returns for each completion the (end, reward) pairs of its
    steps: `end` is the index, into `completion_ids`, of the last token of the step; ends ascend strictly.
    """

    def __call__(
        self, prompts: list[Any], completions: list[Any], **columns: Any
    ) -> Sequence[float | None] | Coroutine[Any, Any, Sequence[float | None]]:
        """Return one reward per completion; None where it does not apply."""


def call_arguments(group: SampleGroup, prompt_column: str, **others: Any) -> dict[str, Any]:
    """Build the keyword arguments for one group: prompt and columns, repeated for every completion, and `others`."""
    count = len(group.samples)
    row, column = group.prompt.columns, group.prompt.column or prompt_column
    prompt = read_column(row, column) if has_column(row, column) else group.prompt.text
    texts = [sample.text for sample in group.samples]
    chats = [list(sample.messages) or [{"role": "assistant", "content": sample.text}] for sample in group.samples]
    return {
        **{name: [value] * count for name, value in row.items() if name not in RESERVED},
        **others,
        "prompts": [prompt] * count,
        "completions": texts if isinstance(prompt, str) else chats,
        "completion_ids": [list(sample.tokens) for sample in group.samples],
    }


def call_reward(reward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a reward function, and await its coroutine."""
    returned = reward(**arguments)
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


def run_with_timeout(call: Callable[[], T], limit_s: float) -> T:
    """Return the result of `call`. Raises RewardError if it raises or takes longer than `limit_s` seconds.

    The call runs in a daemon thread, which shares models and clients that the function holds. A thread cannot be
    killed: one that hangs is left behind.
    """
    future = Future[T]()

    def run() -> None:
        try:
            with no_exit():
                future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    try:
        error = future.exception(limit_s)
    except TimeoutError:
        raise RewardError(f"took longer than reward.timeout_s={limit_s:g} s") from None
    if isinstance(error, RewardError):
        raise error
    if error:
        raise RewardError(one_line(f"raised {type(error).__name__}: {error}", None)) from error
    return future.result()


def read_values(returned: Sequence[Any], group: SampleGroup) -> Values:
    """Return the values as floats. Raises RewardError: not one per sample, or one that is not finite."""
    values = [None if value is None else float(value) for value in returned]
    if len(values) != len(group.samples):
        raise RewardError(f"returned {len(values)} values for {len(group.samples)} samples")
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise RewardError(f"returned {value}, which is not finite", index)
    return values


def read_steps(returned: Sequence[Any], group: SampleGroup) -> list[StepRewards]:
    """Return one `StepRewards` per sample, () for None.

    Raises RewardError: not one list per sample, no (end, reward) pairs, ends that do not ascend, a reward that is not
    finite.
    """
    rows = [[] if row is None else list(row) for row in returned]
    if len(rows) != len(group.samples):
        raise RewardError(f"returned {len(rows)} lists of steps for {len(group.samples)} samples")
    return [_parse_steps(row, len(group.samples[i].tokens), i) for i, row in enumerate(rows)]


def _parse_steps(row: Sequence[Any], tokens: int, sample: int) -> StepRewards:
    try:
        steps = tuple((int(end), float(reward)) for end, reward in row)
        if any(int(end) != end for end, _ in row):
            raise ValueError("an end is no index")
    except Exception as error:  # they are the user's objects: of a tensor of two values it is a RuntimeError
        raise RewardError(f"returned {row!r:.200} where (end token index, reward) pairs belong", sample) from error
    previous = -1
    for end, reward in steps:
        if not previous < end < tokens:
            raise RewardError(
                f"returned a step that ends at token {end} after one at {previous}: ends ascend, below {tokens}", sample
            )
        if not math.isfinite(reward):
            raise RewardError(f"returned the step reward {reward}, which is not finite", sample)
        previous = end
    return steps


@dataclass(frozen=True)
class EachCompletion:
    """A reward of a group by a user's function that scores one completion."""

    function: Callable[..., Any]

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
        """Return one reward per completion."""
        log_extra = columns.pop("log_extra")
        shared = {name: columns.pop(name) for name in ("trainer_state", "log_metric")}
        extras: list[dict[str, Any]] = [{} for _ in completions]
        outcomes = [
            self.function(
                prompt=prompts[i],
                completion=completions[i],
                log_extra=extras[i].__setitem__,
                **shared,
                **{name: values[i] for name, values in columns.items()},
            )
            for i in range(len(completions))
        ]
        if outcomes and inspect.iscoroutine(outcomes[0]):
            outcomes = asyncio.run(_await_all(outcomes))
        for column in dict.fromkeys(name for extra in extras for name in extra):
            log_extra(column, [extra.get(column) for extra in extras])
        return outcomes


async def _await_all(outcomes: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*map(without_exit, outcomes))


def load_reward(name: str, setting: str) -> Reward:
    """Return a user's reward; one with a parameter `completion` is called for each completion of a group."""
    function = load_attribute(name, f"{setting} {shorten(name)!r}") if is_path(name) else None
    if not _scores_one(function):
        return REWARDS.resolve(name, setting)
    return EachCompletion(SINGLE_REWARDS.resolve(name, setting))


def _scores_one(function: Any) -> bool:
    try:
        return "completion" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # not a function, or written in C
        return False


KEYWORDS = ("prompts", "completions", *OTHERS)
REWARDS: Registry[Reward] = Registry("reward function", keywords=KEYWORDS, usage=USAGE)
SINGLE_REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward function", keywords=("prompt", "completion", *OTHERS), usage=USAGE
)
STEP_REWARDS: Registry[Callable[..., Any]] = Registry("reward function of steps", keywords=KEYWORDS)
