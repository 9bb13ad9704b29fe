"""Environments of the `verifiers` library as a data source and as a rollout function."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from copy import copy
from dataclasses import replace
from statistics import fmean
from typing import Any

from grpo_mp.rollout.endpoint import Endpoint, Session
from grpo_mp.rollout.openai_agent import run_agent
from grpo_mp.rollout.openai_requests import MODEL
from grpo_mp.rollout.protocol import Episode, Policy, Task
from grpo_mp.utils.errors import UserError, one_line, refuse_failures
from grpo_mp.utils.reading import parse_json

VERSIONS = "verifiers>=0.4,<0.5"


class VerifiersRollout:
    """The rollout function `verifiers`: the agents of an environment play an episode on the policy's endpoint."""

    def __init__(self, **settings: Any) -> None:
        """Load an environment. `settings`: the section `env` of verifiers, such as `taskset: {id: NAME}`."""
        with _library("rollout.function_args") as library:
            self._environment = library.load_environment(library.resolve_env_config(settings))
        self._library = library
        self._endpoint = Endpoint()

    async def __call__(self, task: Task, policy: Policy) -> Episode:
        """Play one task. The reward is the mean of the trained agents' rewards.

        Each agent is a role of the policy; several have rewards of their own. Raises RuntimeError if one failed.
        """
        played = await run_agent(
            self._endpoint, policy, lambda session: self._play(task.prompt.columns["task"], session)
        )
        if not played.ok:
            failed = [*played.errors, *(error for trace in played.traces if not trace.ok for error in trace.errors)]
            raise RuntimeError(f"the environment ended with {failed[-1].type}: {one_line(failed[-1].message)}")
        metrics = dict[str, float]()
        rewards = dict[str, list[float]]()
        for trace in played.traces:
            role = trace.agent.name
            values = {name: reward and reward.score for name, reward in trace.rewards.items()} | trace.metrics
            metrics |= {f"{role}/{name}": value for name, value in values.items() if value is not None}
            if trace.agent.trainable:
                rewards.setdefault(role, []).append(trace.reward)
        by_role = {role: fmean(of_role) for role, of_role in rewards.items()}
        episode = policy.episode(fmean(by_role.values()), metrics)
        return episode.with_role_rewards(by_role) if len(by_role) > 1 else episode

    async def _play(self, data: Mapping[str, Any], session: Session) -> Any:
        """Return an episode that the environment ran. The id of an agent's trace is the key of its requests."""
        environment = copy(self._environment)  # which holds the servers of the episode
        make_task = type(environment.taskset).task_type()
        task = make_task(make_task.data_type().model_validate(data), environment.config.taskset.task)
        client = self._library.EvalClientConfig(base_url=session.base_url, api_key_var="")
        sessions = self._endpoint.sessions
        async with AsyncExitStack() as opened:

            def admit(trace: Any) -> None:
                policy = session.policy if trace.agent.trainable else session.policy.unrecorded()
                sessions[trace.id] = replace(session, policy=policy, role=trace.agent.name)
                opened.callback(sessions.pop, trace.id)

            await opened.enter_async_context(environment.serving())
            return await environment.run_episode(task, self._library.ModelContext(MODEL, client), on_trace=admit)


def read_taskset(name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each task of a taskset: `prompt`, its chat messages, and `task`, its data.

    `name`: `NAME`, or with settings of the taskset `NAME:{"count": 100}`.
    """
    taskset, _, settings = name.partition(":")
    given = parse_json(settings or "{}", f"data.source=verifiers: the settings of {name!r}")
    with _library(f"data.source=verifiers: {taskset}") as library:
        config = library.taskset_config_type(taskset).model_validate({**given, "id": taskset})
        tasks = library.load_taskset(config)
        if not tasks.bounded:
            raise ValueError("it has no end: set its size in its settings")
        for task in tasks:
            data = task.data.model_dump(mode="json")
            asked = data["prompt"] or ""
            messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            system = [{"role": "system", "content": data["system_prompt"]}] if data["system_prompt"] else []
            yield {"prompt": system + messages, "task": data}


@contextmanager
def _library(section: str) -> Iterator[Any]:
    """Yield the library. Raises UserError where it is missing, and for a failure of the body."""
    try:
        library = importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UserError(
            f"{section}: verifiers is missing here, or of another version ({error}): pip install {VERSIONS!r}"
        ) from error
    with refuse_failures(f"{section}: loading it failed"):
        yield library
