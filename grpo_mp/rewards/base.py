"""Reward functions, how they are loaded and called: the convention of TRL's `reward_funcs`."""

import asyncio
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Coroutine, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from grpo_mp.errors import UserError, nearest
from grpo_mp.rewards.timeouts import no_exit
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


def load_reward(name: str, setting: str = "reward.functions") -> Any:
    """Import 'module:function' or 'path/file.py:function': a `Reward` or `StepReward`, as the setting says.

    Raises UserError with the reason where that fails.
    """
    source, colon, function = name.rpartition(":")
    if not colon or not source or not function:
        raise UserError(f"{setting} {name!r}: write module:function or path/file.py:function")
    try:
        with no_exit():
            is_file = source.endswith(".py")
            module = _load_file(Path(source), f"{setting} {name!r}") if is_file else import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise UserError(f"{setting} {name!r}: importing {source} failed: {reason}") from error
    reward = vars(module).get(function)
    if not callable(reward):
        hint = nearest(function, [key for key, value in vars(module).items() if callable(value)])
        raise UserError(f"{setting} {name!r}: {source} has no function {function}{hint}")
    return reward


def _load_file(path: Path, label: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{label}: no such file: {path}")
    module_name = f"grpo_mp_reward_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{label}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up here
    spec.loader.exec_module(module)
    return module
