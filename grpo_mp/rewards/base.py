"""Load and call user reward functions (TRL's `reward_funcs` convention) with a time limit, and check their results."""

import asyncio
import inspect
import math
import operator
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from grpo_mp.utils.errors import one_line
from grpo_mp.utils.reading import has_column, read_column
from grpo_mp.utils.registry import Registry
from grpo_mp.utils.types import SampleGroup, StepRewards

RESERVED = ("prompt", "completion", "completion_ids")  # data columns that are not passed to reward functions
USAGE = "write def reward(prompts, completions, **columns)"
Values = list[float | None]  # one per sample; None: the reward does not apply
T = TypeVar("T")


class RewardError(Exception):
    """Failure of a reward: an exception, a timeout or an invalid return value.

    `sample`: index of the sample to show in the message. `scored`: values of the samples that did not fail, by index.
    """

    def __init__(self, reason: str, sample: int = 0, scored: Mapping[int, float | None] | None = None) -> None:
        super().__init__(reason)
        self.sample = sample
        self.scored = scored or {}


class Reward(Protocol):
    """A user's reward function, plain or async: one value per completion, None where the reward does not apply.

    Keyword arguments: `prompts` and `completions` as texts, or as message lists if the prompt column holds messages;
    `completion_ids`; every data column as a list; `trainer_state`; the callbacks `log_extra(column, values)`, which
    adds a column to the sample files, and `log_metric(name, value)`, whose mean over the step becomes a metric.

    A function of `reward.steps` has the same keyword arguments and returns (end, reward) pairs for each completion:
    `end` is the index in `completion_ids` of the step's last token; ends ascend strictly.
    """

    def __call__(
        self, prompts: list[Any], completions: list[Any], **columns: Any
    ) -> Sequence[float | None] | Coroutine[Any, Any, Sequence[float | None]]:
        """Return one reward per completion; None where the reward does not apply."""


def call_arguments(group: SampleGroup, prompt_column: str, **others: Any) -> dict[str, Any]:
    """Build the keyword arguments for one group: prompt and columns, repeated for every completion, and `others`."""
    count = len(group.samples)
    row = group.prompt.columns
    column = group.prompt.column or prompt_column
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
    """Call a reward function and return its result; run the coroutine of an async function to its end."""
    returned = reward(**arguments)
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


def run_with_timeout(call: Callable[[], T], limit_s: float) -> T:
    """Run `call` and return its result. Raises RewardError if it raises or takes longer than `limit_s` seconds.

    The call runs in a daemon thread, because it shares the models and clients that the function holds. A thread cannot
    be killed: a call that hangs keeps its thread.
    """
    future = Future[T]()

    def run() -> None:
        try:
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
    """Convert the returned values to floats. Raises RewardError unless there is one finite value or None per sample."""
    values = [None if value is None else float(value) for value in returned]
    if len(values) != len(group.samples):
        raise RewardError(f"returned {len(values)} values for {len(group.samples)} samples")
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise RewardError(f"returned {value}, which is not finite", index)
    return values


def read_steps(returned: Sequence[Any], group: SampleGroup) -> list[StepRewards]:
    """Convert the returned steps to one `StepRewards` per sample, () for None.

    Raises RewardError unless each sample has a list of (end, reward) pairs with ascending ends and finite rewards.
    """
    rows = [[] if row is None else list(row) for row in returned]
    if len(rows) != len(group.samples):
        raise RewardError(f"returned {len(rows)} lists of steps for {len(group.samples)} samples")
    return [_parse_steps(row, len(group.samples[i].tokens), i) for i, row in enumerate(rows)]


def _parse_steps(row: Sequence[Any], tokens: int, sample: int) -> StepRewards:
    try:
        steps = tuple((operator.index(end), float(reward)) for end, reward in row)
    except Exception as error:  # a user's object may raise anything, such as a tensor's RuntimeError
        raise RewardError(f"returned {row!r:.200} where (end token index, reward) pairs belong", sample) from error
    for previous, (end, reward) in zip((-1, *(end for end, _ in steps)), steps, strict=False):
        if not (previous < end < tokens and math.isfinite(reward)):
            raise RewardError(
                f"returned the step ({end}, {reward}) after one at {previous}: ends ascend, below {tokens}, and "
                "rewards are finite",
                sample,
            )
    return steps


KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
REWARDS: Registry[Reward] = Registry("reward function", keywords=KEYWORDS, usage=USAGE)
STEP_REWARDS: Registry[Callable[..., Any]] = Registry("reward function of steps", keywords=KEYWORDS)
