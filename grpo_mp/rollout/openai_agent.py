"""Rollout function for any agent that uses an OpenAI-compatible endpoint."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from grpo_mp.rollout.endpoint import Endpoint, Session
from grpo_mp.rollout.protocol import Episode, EpisodeLimitError, Policy, Task
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.user_code import load_attribute, without_exit

SETTING = "rollout.function_args"
CANCEL_LIMIT_S = 5.0  # time that a cancelled agent has to end


class Agent(Protocol):
    """Signature of the agent in `function_args.agent`. It must not block: await, or use `asyncio.to_thread`."""

    async def __call__(self, task: Task, base_url: str, api_key: str, /) -> float | Sequence[float] | None:
        """Work on one task; return the reward of the episode, or None if other reward terms score it.

        With `reward.steps: episode`, return a list with one reward for each turn.
        """


class OpenAIAgent:
    """The rollout function `openai_agent`: runs the user's agent against the policy's endpoint."""

    def __init__(self, agent: str) -> None:
        """Load the agent. `agent`: a coroutine function, as 'module:name' or 'file.py:name'."""
        self._endpoint = Endpoint()
        self._agent = load_attribute(agent, f"{SETTING}: agent {agent!r}")
        if not inspect.iscoroutinefunction(self._agent):
            raise UserError(f"{SETTING}: agent {agent!r}: it must be a coroutine function: async def agent(task, ...)")

    async def __call__(self, task: Task, policy: Policy) -> Episode:
        """Roll out one task: each request of the agent becomes a turn of the policy."""
        returned = await run_agent(
            self._endpoint, policy, lambda session: self._agent(task, session.base_url, session.api_key)
        )
        if isinstance(returned, list | tuple):
            return policy.episode().with_step_rewards(returned)
        return policy.episode(returned)


async def run_agent(endpoint: Endpoint, policy: Policy, work: Callable[[Session], Coroutine[Any, Any, Any]]) -> Any:
    """Run `work`, an agent's coroutine, on one episode and return its result.

    Raises the exception that ended the episode or the agent; EpisodeLimitError if a request exceeded a limit.
    """
    async with endpoint.open(policy) as session:
        agent = asyncio.ensure_future(without_exit(work(session)))
        try:
            await asyncio.wait({agent, session.failure}, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            if agent.cancelled():
                raise RuntimeError("the agent cancelled its own task")
            return agent.result()
        except Exception:
            if session.reached_limit.is_set():  # the agent failed on the error reply to a request beyond the limit
                raise EpisodeLimitError("a request passed a limit of the episode") from None
            raise
        finally:
            agent.cancel()
            await asyncio.wait({agent}, timeout=CANCEL_LIMIT_S)
