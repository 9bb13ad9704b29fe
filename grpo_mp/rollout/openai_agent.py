"""A rollout by any agent that speaks to an OpenAI endpoint: a coroutine function, or a command."""

import asyncio
import inspect
import json
import math
import os
import shlex
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from grpo_mp.rollout.endpoint import LOOPBACK, Endpoint, Session
from grpo_mp.rollout.protocol import Episode, EpisodeLimitError, Policy, Task
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.processes import shared_environment, with_descendants
from grpo_mp.utils.user_code import SelfCancelledError, load_attribute, without_exit

SETTING = "rollout.function_args"
TAIL = 2**16  # bytes of a command's output that are kept
CANCEL_LIMIT_S = 5.0  # for an agent to end; its key has
KILL_LIMIT_S = 2.0  # for a command to be ended with what it has started


class Agent(Protocol):
    """What `function_args.agent` names. It must not block: await, or be a command."""

    async def __call__(self, task: Task, base_url: str, api_key: str, /) -> float | Sequence[float] | None:
        """Work on one task; return the reward of the episode, or None where the run's other terms decide.

        A list has a reward for each turn, for `reward.steps: episode`.
        """


class OpenAIAgent:
    """The rollout function `openai_agent`."""

    def __init__(
        self,
        agent: str | None = None,
        command: str | Sequence[str] | None = None,
        environment: Sequence[str] = (),
    ) -> None:
        """Load `agent`, 'module:name' or 'file.py:name' of a coroutine function, or store a `command` instead.

        environment: variables of the run that a command finds beside SHARED_VARIABLES.
        """
        if isinstance(environment, str) or (missing := [name for name in environment if name not in os.environ]):
            named = repr(environment) if isinstance(environment, str) else ", ".join(missing)
            raise UserError(f"{SETTING}: environment is a list of variables that are set, and {named} is none")
        self._variables = tuple(environment)
        if (agent is None) == (command is None):
            raise UserError(f"{SETTING}: openai_agent takes either agent, 'file.py:function', or command")
        self._endpoint = Endpoint()
        self._command = tuple(shlex.split(command) if isinstance(command, str) else command or ())
        self._agent = _load_agent(agent) if agent is not None else self._run_command

    async def __call__(self, task: Task, policy: Policy) -> Episode:
        """Roll out one task: the agent's requests are the policy's turns."""
        returned = await run_agent(
            self._endpoint, policy, lambda session: self._agent(task, session.base_url, session.api_key)
        )
        if isinstance(returned, list | tuple):
            return policy.episode().with_step_rewards(returned)
        return policy.episode(_as_reward(returned))

    async def _run_command(self, task: Task, base_url: str, api_key: str) -> float | None:
        """Run the command with the task on its standard input; return the last line of its output if it is a number.

        It and all that it has started end with the episode, and with this process. Raises RuntimeError for another
        status than 0.
        """
        process = await asyncio.create_subprocess_exec(
            *with_descendants(self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(self._variables, base_url, api_key),
            start_new_session=True,
        )
        try:
            output, errors, _ = await asyncio.gather(
                _tail(process.stdout), _tail(process.stderr), _give(process.stdin, _task_line(task))
            )
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()  # then it kills what it has started
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), KILL_LIMIT_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status:
            raise RuntimeError(f"the command ended with status {status}: {one_line(_last_line(errors))}")
        return _number(_last_line(output))


def _load_agent(path: str) -> Any:
    label = f"{SETTING}: agent {path!r}"
    agent = load_attribute(path, label)
    if not inspect.iscoroutinefunction(agent):
        raise UserError(f"{label}: it must be a coroutine function: async def agent(task, base_url, api_key)")
    try:
        inspect.signature(agent).bind("task", "base_url", "api_key")
    except TypeError as error:
        raise UserError(f"{label}: it is called with (task, base_url, api_key): {error}") from error
    return agent


async def run_agent(endpoint: Endpoint, policy: Policy, work: Callable[[Session], Coroutine[Any, Any, Any]]) -> Any:
    """Return what the work of an agent on one episode returns. Raises what ended the episode, or the agent."""
    async with endpoint.open(policy) as session:
        agent = asyncio.ensure_future(without_exit(work(session)))
        try:
            await asyncio.wait({agent, session.failure}, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            if agent.cancelled():
                raise SelfCancelledError("the agent cancelled its own task")
            return agent.result()
        except Exception:
            if session.reached_limit:  # the agent had no use for the answer which said so
                raise EpisodeLimitError("a request passed a limit of the episode") from None
            raise
        finally:
            agent.cancel()
            await asyncio.wait({agent}, timeout=CANCEL_LIMIT_S)


def _as_reward(returned: Any) -> float | None:
    if returned is None:
        return None
    if not isinstance(returned, int | float) or not math.isfinite(returned):
        raise TypeError(f"the agent returned {one_line(repr(returned), 40)}: a reward is a number, or None")
    return float(returned)


def _environment(variables: Sequence[str], base_url: str, api_key: str) -> dict[str, str]:
    direct = {name: ",".join(filter(None, [os.environ.get(name), LOOPBACK])) for name in ("NO_PROXY", "no_proxy")}
    return {**shared_environment(variables), **direct, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}


def _task_line(task: Task) -> bytes:
    fields: Mapping[str, Any] = {
        "messages": task.messages,
        "answer": task.prompt.answer,
        "columns": task.prompt.columns,
        "index": task.index,
        "step": task.step,
    }
    return json.dumps(fields, default=str).encode() + b"\n"


async def _tail(stream: asyncio.StreamReader | None) -> str:
    """Read a stream to its end; return the last of it."""
    assert stream
    kept = b""
    while piece := await stream.read(TAIL):
        kept = (kept + piece)[-TAIL:]
    return kept.decode("utf-8", "replace")


async def _give(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    assert stream
    with suppress(ConnectionError):  # a command need not read its task
        stream.write(data)
        await stream.drain()
    stream.close()


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
