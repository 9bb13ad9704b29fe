"""Rolls out groups of episodes on one engine, applies limits, handles failures, and converts episodes to samples."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.config.registries import ROLLOUT_FUNCTIONS
from grpo_mp.config.sections import RolloutConfig
from grpo_mp.data.template import ChatRenderer
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.episode_policy import EpisodeAbortedError, EpisodeContext, EpisodePolicy, EpisodeWatch
from grpo_mp.rollout.protocol import Episode, EpisodeLimitError, RecordedSequence, RolloutFunction, Segment, Task
from grpo_mp.rollout.tools import EpisodeTools, ToolKit, load_tools
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.types import EpisodeState, ExpertIds, KeptTokens, Message, Prompt, Sample, SampleGroup
from grpo_mp.utils.user_code import without_exit

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeParts:
    """Rollout function, tools and chat renderer, as loaded from the settings under `rollout`."""

    config: RolloutConfig
    function: RolloutFunction
    tools: ToolKit
    renderer: ChatRenderer


def load_episode_parts(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None
) -> EpisodeParts | None:
    """Load the rollout function and the tools; return None if a rollout is a single response.

    `variables`: variables of the chat template.
    """
    name = config.rollout_function
    if name is None:
        return None
    function: RolloutFunction = ROLLOUT_FUNCTIONS.resolve(name, "rollout.function", config.function_args)
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)):
        raise UserError(f"rollout.function {name!r}: it must be a coroutine function: async def rollout(task, policy)")
    tools = load_tools(config.tools, arguments=config.tool_args, variables=config.tool_environment)
    renderer = ChatRenderer(tokenizer, tools.schemas, variables or {})
    renderer.check()
    return EpisodeParts(config, function, tools, renderer)


@dataclass(frozen=True)
class Outcome:
    """An ended episode. `error`: reason of the failure; "": no failure. `seconds`: mean of a turn and of each tool."""

    episode: Episode
    error: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EpisodeGroup:
    """Group of `count` episodes of a prompt. `routing`: None: the samples record no routed experts."""

    prompt: Prompt
    group_id: int
    count: int
    step: int
    sampling: SamplingParams
    routing: ModelShape | None


@dataclass(frozen=True)
class EpisodeRunner:
    """Rolls out groups of episodes on one engine. `slots`: limits the number of concurrent episodes."""

    parts: EpisodeParts
    client: EngineClient
    slots: asyncio.Semaphore
    pause: asyncio.Event = field(default_factory=asyncio.Event)  # when set, all running episodes are cancelled

    async def run_group(
        self,
        group: EpisodeGroup,
        earlier: Sequence[Sample] = (),
        record: Callable[[Sample], None] = lambda _: None,
    ) -> tuple[Sample, ...]:
        """Roll out the episodes of a group, without those in `earlier`; return all samples, fewer after a `pause`.

        `record`: called in a thread with the sample of each episode that ends before the last one. Raises EngineError;
        raises TimeoutError `rollout.group_timeout_s` after the start of the first episode.
        """
        config = self.parts.config
        begun = asyncio.Event()
        context = EpisodeContext(
            self.client,
            self.parts.renderer,
            limits=config.limits,
            sampling=group.sampling,
            max_prompt_tokens=config.max_prompt_tokens,
            tool_parser=config.tool_parser,
            routing=group.routing,
        )
        samples = {sample.index: sample for sample in earlier}

        async def roll_out(index: int) -> None:
            episode = asyncio.create_task(self._run(context, group, index, begun))
            episode.add_done_callback(_retrieve)
            try:
                await asyncio.wait({episode})
            finally:
                episode.cancel()
            outcome = _cancelled(group.prompt, index) if episode.cancelled() else episode.result()
            samples[index] = as_sample(outcome, group.group_id, index, self.parts.renderer.tokenizer.eos_token_id)
            if len(samples) < group.count:  # the last sample is recorded with the whole group
                await asyncio.to_thread(record, samples[index])

        episodes = [asyncio.create_task(roll_out(index)) for index in range(group.count) if index not in samples]
        if episodes:  # else another engine has completed the group that a lost engine gave back
            waits = [asyncio.create_task(begun.wait()), asyncio.create_task(self.pause.wait())]
            for episode in episodes:
                episode.add_done_callback(_retrieve)
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                async with asyncio.timeout(config.group_timeout_s):
                    await _until(waits[1], episodes)
            finally:
                for other in (*episodes, *waits):
                    other.cancel()
        return tuple(sample for _, sample in sorted(samples.items()))

    async def _run(self, context: EpisodeContext, group: EpisodeGroup, index: int, begun: asyncio.Event) -> Outcome:
        """Roll out one episode when a slot is free; return failures as an Outcome.

        Raises EngineError and EpisodeAbortedError, even if the rollout function has caught them.
        """
        async with self.slots:
            begun.set()
            outcome, policy = await self._roll_out(context, group.prompt, index, group.step)
        if policy.watch.stopped_by:
            raise policy.watch.stopped_by
        if outcome.error:
            LOGGER.info("step %d: %s", group.step, outcome.error)
        return replace(outcome, seconds=_seconds(policy))

    async def _roll_out(
        self, context: EpisodeContext, prompt: Prompt, index: int, step: int
    ) -> tuple[Outcome, EpisodePolicy]:
        """Run the rollout function with its tools under the episode's time limit; return outcome and policy handle."""
        clock = asyncio.timeout(context.limits.episode_s)
        own = replace(context, sampling=context.sampling.only(index))
        policy = EpisodePolicy(own, prompt, EpisodeWatch(clock))
        label = f"prompt {prompt.index}, sample {index}"
        try:
            async with AsyncExitStack() as opened, clock:
                tools = await self.parts.tools.open(context.limits.tool_s, context.limits.tool_characters)
                opened.push_async_callback(tools.close)
                tools = replace(tools, calls_s=policy.watch.calls_s)
                messages = await self._begin(tools, prompt)
                returned = await without_exit(
                    self.parts.function(Task(prompt, index, step=step, tools=tools, messages=messages), policy)
                )
                if not isinstance(returned, Episode):
                    raise TypeError(f"it returned {type(returned).__name__}, no Episode")
                if returned.reward is None:
                    returned = replace(returned, reward=await tools.reward())
        except EpisodeLimitError:
            return Outcome(policy.episode(state=policy.limit or "truncated")), policy
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            if clock.expired():
                sentence = f"it took longer than rollout.limits.episode_s={context.limits.episode_s:g} s"
                state: EpisodeState = "timeout"
            else:
                sentence = f"it raised {type(error).__name__}: {one_line(error)}"
                state = "error"
            episode = policy.episode(state=state)
            return Outcome(episode, f"{label}, turn {episode.turns}: {sentence}"), policy
        state = policy.limit if policy.limit and returned.state in ("completed", "truncated") else returned.state
        return Outcome(replace(returned, state=state)), policy

    async def _begin(self, tools: EpisodeTools, prompt: Prompt) -> tuple[Message, ...]:
        """Reset the environments; return the prompt's messages with the text of `reset` appended to the last one."""
        messages = prompt.messages
        said = self.parts.renderer.clean(await tools.reset(prompt.columns))
        if said:
            messages = (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + said})
        return messages


def _seconds(policy: EpisodePolicy) -> dict[str, float]:
    """Return the mean seconds of a turn, and of a call of each tool."""
    turn = {"turn_s": policy.watch.generated_s / policy.turns} if policy.turns else {}
    return turn | {f"{name}_s": fmean(seconds) for name, seconds in policy.watch.calls_s.items()}


def _cancelled(prompt: Prompt, index: int) -> Outcome:
    """Return the outcome of an episode whose function cancelled its own task, which loses the recorded turns."""
    error = f"prompt {prompt.index}, sample {index}: its function cancelled its own task"
    LOGGER.info("%s", error)
    return Outcome(Episode((Segment(prompt.tokens, generated=False),), state="error"), error)


def _retrieve(episode: asyncio.Task[Any]) -> None:
    # Otherwise asyncio would log the exceptions of episodes that fail after the first one.
    if not episode.cancelled():
        episode.exception()


async def _until(pause: asyncio.Task[bool], episodes: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all episodes have ended, an episode is aborted, or `pause` is done; re-raise an EngineError."""
    left = [*episodes]
    while left and not pause.done():
        await asyncio.wait({*left, pause}, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for episode in left if episode.done() and (error := episode.exception())]
        if any(isinstance(error, EpisodeAbortedError) for error in errors):
            return
        if errors:
            raise errors[0]
        left = [episode for episode in left if not episode.done()]


def as_sample(outcome: Outcome, group_id: int, index: int, end_token: int) -> Sample:
    """Convert an episode to a sample.

    An episode without a generated token gets a response of one given token, `end_token`, so that it counts in its
    group.
    """
    episode = outcome.episode
    sequences: list[RecordedSequence | Episode] = [*episode.earlier, episode]
    *earlier, last = (
        _tokens_of(one.segments, one.routed_experts, end_token) | {"role": one.role, "messages": one.messages}
        for one in sequences
    )
    return Sample(
        group_id,
        index,
        **last,
        truncated=episode.state == "truncated",
        text=episode.answer,
        state=episode.state,
        episode_reward=episode.reward,
        metrics={**episode.metrics, "turns": episode.turns, "forks": episode.forks, **outcome.seconds},
        error=outcome.error,
        earlier=tuple(
            Sample(group_id, index, **tokens, truncated=False, part=part)
            for part, tokens in enumerate(earlier, start=1)
        ),
    )


def _tokens_of(segments: Sequence[Segment], experts: ExpertIds | None, end_token: int) -> dict[str, Any]:
    """Return the fields of a Sample that describe its tokens.

    The prompt consists of the tokens before the first generated token. Given tokens after the last generated token
    are dropped, because no loss depends on them.
    """
    numbers = [number for number, segment in enumerate(segments) if segment.generated and segment.tokens]
    first, last = (numbers[0], numbers[-1] + 1) if numbers else (len(segments), 0)
    prompt = tuple(token for segment in segments[:first] for token in segment.tokens)
    response = segments[first:last] or (Segment((end_token,), generated=False),)
    versions = list[int]()
    rewards = list[tuple[int, float]]()
    end = 0
    for segment in response:
        before = versions[-1] if versions else 0
        versions += segment.weight_versions if segment.generated else (before,) * len(segment.tokens)
        end += len(segment.tokens)
        if segment.reward is not None:
            rewards.append((end - 1, segment.reward))
    return {
        "prompt_tokens": prompt or (end_token,),
        "tokens": tuple(token for segment in response for token in segment.tokens),
        "rollout_logprobs": tuple(
            value for segment in response for value in (segment.logprobs or (0.0,) * len(segment.tokens))
        ),
        "weight_versions": tuple(versions),
        "generated": tuple(segment.generated for segment in response for _ in segment.tokens),
        "step_rewards": tuple(rewards),
        "verify_steps": sum(segment.verify_steps for segment in response),
        "kept": KeptTokens.joined([(segment.kept, len(segment.tokens)) for segment in response]),
        "routed_experts": experts if numbers else None,
    }


def with_failures(group: SampleGroup, failed: str | float) -> SampleGroup:
    """Return the group with the reward of failed and timed-out episodes set to `failed`, if `failed` is a number.

    `failed`: the setting `rollout.failed`.
    """
    if isinstance(failed, str):
        return group
    samples = (
        replace(sample, reward=failed, is_scored=True) if sample.state in ("error", "timeout") else sample
        for sample in group.samples
    )
    return replace(group, samples=tuple(samples))
