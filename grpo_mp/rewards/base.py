"""Reward functions, how they are loaded, called in limited time and checked: the convention of TRL's `reward_funcs`."""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from grpo_mp.rewards.code_tests import read_tests
from grpo_mp.rewards.settings import DATA_SET, STEPS, RewardConfig
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import has_column, read_column, shorten
from grpo_mp.utils.registry import Registry
from grpo_mp.utils.types import SampleGroup, StepRewards
from grpo_mp.utils.user_code import is_path, load_attribute, no_exit, without_exit

OTHERS = ("completion_ids", "trainer_state", "log_extra", "log_metric")  # that every reward is called with
RESERVED = ("prompt", "completion", "completion_ids")  # columns that are not passed on
USAGE = (
    "write def reward(prompts, completions, **columns), or def reward(prompt, completion, **columns), which is called "
    "for each answer"
)
Values = list[float | None]  # one per sample; None: the reward does not apply
T = TypeVar("T")


class RewardError(Exception):
    """A reward raised, took too long or returned no reward.

    `sample` is the index of the sample to show; `scored` holds the values of samples that did not fail, by index, None
    where the reward does not apply.
    """

    def __init__(self, reason: str, sample: int = 0, scored: Mapping[int, float | None] | None = None) -> None:
        super().__init__(reason)
        self.sample, self.scored = sample, scored or {}


class Reward(Protocol):
    """A user's reward: one value per completion, None where it does not apply. It may also be a coroutine function.

    Keywords: `prompts` and `completions` as text, or as message lists where the prompt column holds messages;
    `completion_ids`; every data column as a list; `trainer_state`; the callbacks `log_extra` (a column of the sample
    files, one value per completion) and `log_metric` (a number whose mean over the step becomes a metric). Where
    `rollout.tools` or `rollout.environment_factory` has a class, `environments`: its instance of each episode.

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
    is_chat = not isinstance(prompt, str)
    environments = [sample.environment for sample in group.samples]
    has_any = any(environment is not None for environment in environments)
    return {
        **{name: [value] * count for name, value in row.items() if name not in RESERVED},
        **({"environments": environments} if has_any else {}),
        **others,
        "prompts": [prompt] * count,
        "completions": chats if is_chat else texts,
        "completion_ids": [list(sample.tokens) for sample in group.samples],
    }


def call_reward(reward: Reward, arguments: dict[str, Any]) -> Values:
    """Call a reward function and await its coroutine. Raises what it raises, TypeError where it returns no list."""
    return [None if value is None else float(value) for value in _call(reward, arguments)]


def call_step_reward(reward: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """Call a reward function of steps in the same way."""
    return [None if row is None else list(row) for row in _call(reward, arguments)]


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    returned = function(**arguments)
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


def run_with_timeout(call: Callable[[], T], limit_s: float) -> T:
    """Return the result of `call`. Raises RewardError if it raises or takes longer than `limit_s` seconds.

    The call runs in a daemon thread: it shares models and clients that the function holds, which a process could
    not. A thread cannot be killed, so one that hangs is left behind; being a daemon it does not keep the program alive.
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


def validate_values(values: Values, group: SampleGroup) -> Values:
    """Return the values. Raises RewardError: not one per sample, or one that is not finite."""
    if len(values) != len(group.samples):
        raise RewardError(f"returned {len(values)} values for {len(group.samples)} samples")
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise RewardError(f"returned {value}, which is not finite", index)
    return values


def validate_steps(rows: Sequence[Any], group: SampleGroup) -> list[StepRewards]:
    """Return one `StepRewards` per sample; None and an empty list are a response without steps.

    Raises RewardError: not one list per sample, no (end, reward) pairs, ends out of range or not ascending,
    a reward that is not finite.
    """
    if len(rows) != len(group.samples):
        raise RewardError(f"returned {len(rows)} lists of steps for {len(group.samples)} samples")
    return [_parse_steps(row, len(group.samples[i].tokens), i) for i, row in enumerate(rows)]


def _parse_steps(row: Any, tokens: int, sample: int) -> StepRewards:
    try:
        steps = tuple((_as_integer(end), float(reward)) for end, reward in (row if row is not None else ()))
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


def _as_integer(end: Any) -> int:
    if int(end) != end:
        raise ValueError(f"{end} is no index")
    return int(end)


@dataclass(frozen=True)
class EachCompletion:
    """A reward of a group by a user's function that scores one completion."""

    function: Callable[..., Any]

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> Values:
        """Return one reward per completion. Raises RewardError: the first that failed, with the others' values."""
        completion_ids, trainer_state, log_extra, log_metric = (columns.pop(name) for name in OTHERS)
        extras: list[dict[str, Any]] = [{} for _ in completions]
        outcomes = [
            _attempt(
                partial(
                    self.function,
                    prompt=prompts[i],
                    completion=completions[i],
                    completion_ids=completion_ids[i],
                    trainer_state=trainer_state,
                    log_extra=extras[i].__setitem__,
                    log_metric=log_metric,
                    **{name: values[i] for name, values in columns.items()},
                )
            )
            for i in range(len(completions))
        ]
        if any(map(inspect.iscoroutine, outcomes)):
            outcomes = asyncio.run(_await_all(outcomes))
        for column in dict.fromkeys(name for extra in extras for name in extra):
            log_extra(column, [extra.get(column) for extra in extras])
        return _values_of(outcomes)


def _attempt(call: Callable[[], Any]) -> Any:
    """Return what a user's function returns, or the error that it raises."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told with the index of its completion
        return error


async def _await_all(outcomes: Sequence[Any]) -> list[Any]:
    async def result(outcome: Any) -> Any:
        return await without_exit(outcome) if inspect.iscoroutine(outcome) else outcome

    return await asyncio.gather(*map(result, outcomes), return_exceptions=True)


def _values_of(outcomes: Sequence[Any]) -> Values:
    """Return rewards of single completions. Raises RewardError for the first that is none."""
    values, failures = dict[int, float | None](), dict[int, str]()
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            failures[i] = one_line(f"raised {type(outcome).__name__}: {outcome}", None)
            continue
        try:
            values[i] = None if outcome is None else float(outcome)
        except Exception:  # noqa: BLE001 - it is the user's object: of a tensor of two values it is a RuntimeError
            failures[i] = f"returned {outcome!r:.100}, which is no number"
        else:
            if not math.isfinite(values[i] or 0.0):
                failures[i] = f"returned {outcome}, which is not finite"
    if failures:
        scored = {i: value for i, value in values.items() if i not in failures}
        first = next(iter(failures))
        raise RewardError(failures[first], first, scored)
    return [*values.values()]


def load_reward(name: str, setting: str) -> Reward:
    """Return a user's reward; one with a parameter `completion` is called for each of a group."""
    function = load_attribute(name, f"{setting} {shorten(name)!r}") if is_path(name) else None
    if not has_parameter(function, "completion"):
        return REWARDS.resolve(name, setting)
    return EachCompletion(SINGLE_REWARDS.resolve(name, setting))


def has_parameter(function: Any, name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or one that is written in C
        return False


def own_parameters(function: Any) -> frozenset[str]:
    """Return the parameters without a default that only columns of the data can give to a reward."""
    is_single = isinstance(function, EachCompletion)
    given = {*(("prompt", "completion") if is_single else ("prompts", "completions")), *OTHERS, "environments"}
    try:
        parameters = inspect.signature(function.function if is_single else function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return frozenset()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = (one.name for one in parameters if one.default is one.empty and one.kind not in variadic)
    return frozenset(needed) - given


KEYWORDS = ("prompts", "completions", *OTHERS)
REWARDS: Registry[Reward] = Registry("reward function", keywords=KEYWORDS, usage=USAGE)
SINGLE_REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward function", keywords=("prompt", "completion", *OTHERS), usage=USAGE
)
STEP_REWARDS: Registry[Callable[..., Any]] = Registry("reward function of steps", keywords=KEYWORDS)


@dataclass(frozen=True)
class RowCheck:
    """Checks the rows of the prompts at the start."""

    settings: RewardConfig
    set_weights: Mapping[str, Mapping[str, float]]  # of the terms that prompts of a data set have, by its name
    parameters: Mapping[str, frozenset[str]]  # by name of a user's function: those that columns must give

    def __call__(self, columns: Mapping[str, Any], location: str) -> None:
        """Raise UserError, which begins with the location of the row, where a reward cannot score its prompt."""
        name = columns.get(DATA_SET)
        weights = self.set_weights.get(name) if isinstance(name, str) else None
        terms = self.settings.with_correct(self.settings.weights if weights is None else weights)
        given = columns.keys() - set(RESERVED)
        for function in self.parameters.keys() & {*terms, STEPS}:
            if missing := sorted(self.parameters[function] - given):
                raise UserError(
                    f"{location}: reward {function} has the parameter {', '.join(missing)}, and the row no such "
                    f"column: {USAGE}"
                )
        code = self.settings.code
        if code and "code" in terms:
            try:
                read_tests(columns, code.tests, code.partial)
            except ValueError as error:
                raise UserError(f"{location}: {error}") from error


def make_row_check(settings: RewardConfig, set_weights: Mapping[str, Mapping[str, float]]) -> RowCheck:
    """Load the user's functions and return the check."""
    functions = {name: load_reward(spec, "reward.functions") for spec, name in settings.function_names.items()}
    parameters = {name: own_parameters(function) for name, function in functions.items()}
    if settings.steps_function:
        parameters[STEPS] = own_parameters(STEP_REWARDS.resolve(settings.steps_function, "reward.steps"))
    return RowCheck(settings, set_weights, parameters)
