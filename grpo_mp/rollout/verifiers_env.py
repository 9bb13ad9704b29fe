"""Environments of the `verifiers` library as a data source and as a rollout function."""

import importlib
import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx

from grpo_mp.rollout.endpoint import Endpoint, Session
from grpo_mp.rollout.openai_agent import run_agent
from grpo_mp.rollout.protocol import Episode, Policy, Task
from grpo_mp.utils.errors import UserError, one_line

VERSIONS = "verifiers>=0.1.14,<0.4"
FIELDS = ("prompt", "answer", "info", "task", "example_id")  # columns of a data row that `run_rollout` needs


class VerifiersRollout:
    """The rollout function `verifiers`: an environment rolls out an episode against the policy's endpoint."""

    def __init__(self, environment: str, args: Mapping[str, Any] | None = None) -> None:
        """Load an environment by name. Raises UserError for an environment that rolls out or scores whole groups."""
        self._environment = load_environment(environment, json.dumps(args or {}, sort_keys=True))
        if self._environment.requires_group_rollouts:
            raise UserError(f"{_label(environment)}: it rewards or runs whole groups, which is not supported")
        self._endpoint = Endpoint()

    async def __call__(self, task: Task, policy: Policy) -> Episode:
        output = await run_agent(self._endpoint, policy, lambda session: self._play(task, session))
        return policy.episode(output["reward"], output["metrics"])

    async def _play(self, task: Task, session: Session) -> Mapping[str, Any]:
        openai = importlib.import_module("openai")
        clients = importlib.import_module("verifiers.clients")
        columns = task.prompt.columns
        row = {name: columns[name] for name in FIELDS if columns.get(name) is not None}
        async with openai.AsyncOpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False, timeout=None),
        ) as connection:
            client = clients.OpenAIChatCompletionsClient(connection)
            output: Mapping[str, Any] = await self._environment.run_rollout(row, client, "policy", {})
        if output.get("error"):
            raise RuntimeError(f"the environment ended with {one_line(output['error'])}")
        return output


def read_environment(name: str) -> Iterator[dict[str, Any]]:
    """Yield the dataset rows of an environment. `name`: `NAME`, `NAME:eval` or `NAME:train:{"argument": 1}`."""
    environment, _, rest = name.partition(":")
    split, _, args = rest.partition(":")
    if split not in ("", "train", "eval"):
        raise UserError(f"data.source=verifiers: {name!r} is not NAME, NAME:train or NAME:eval, with :{{arguments}}")
    try:
        loaded = load_environment(environment, json.dumps(json.loads(args or "{}"), sort_keys=True))
    except ValueError as error:
        raise UserError(f"data.source=verifiers: the arguments of {name!r} are no JSON: {error}") from error
    yield from loaded.get_eval_dataset() if split == "eval" else loaded.get_dataset()


@cache
def load_environment(name: str, args: str) -> Any:
    """Load an environment; cached, so that each is loaded once in a process. `args`: keyword arguments as JSON."""
    try:
        library: Any = importlib.import_module("verifiers.utils.env_utils")
    except ImportError as error:
        raise UserError(
            f"{_label(name)}: the library is missing here, or of another version ({error}): pip install {VERSIONS!r}"
        ) from error
    try:
        with _own_signals():
            return library.load_environment(name, **json.loads(args))
    except Exception as error:
        raise UserError(f"{_label(name)}: loading it failed: {type(error).__name__}: {one_line(error)}") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after the body, since loading an environment replaces them."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _label(name: str) -> str:
    return f"environment {name!r} of verifiers"
