"""The policy's handle of one episode: renders what is new, generates on this rank's engine, records every token."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from grpo_mp.config.sections import EpisodeLimits
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.episodes.chat import ChatRenderer
from grpo_mp.episodes.protocol import Episode, EpisodeLimitError, Segment, ToolCall, Turn
from grpo_mp.errors import EngineError
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.routed_experts import joined_routed_experts
from grpo_mp.types import EpisodeState, ExpertIds, Message, Prompt


class EpisodeAbortedError(Exception):
    """The step has its groups: the engine has ended this episode's request."""


@dataclass(frozen=True)
class EpisodeContext:
    """What all episodes of a rollout have in common."""

    client: EngineClient
    renderer: ChatRenderer
    limits: EpisodeLimits
    sampling: SamplingParams  # `max_response_tokens`: of all turns, what is given between them included
    tool_parser: str | None
    routing: ModelShape | None


@dataclass
class EpisodePolicy:
    """Implements `Policy`. `clock` runs while the policy does not generate."""

    context: EpisodeContext
    prompt: Prompt
    clock: asyncio.Timeout
    stopped_by: EngineError | EpisodeAbortedError | None = None  # whatever the rollout function made of it
    limit: EpisodeState | None = None  # which was reached
    _segments: list[Segment] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)  # that the segments are of
    _prompt_messages: int = 0
    _tokens: tuple[int, ...] = ()
    _experts: ExpertIds | None = field(default=None, repr=False)
    _answer: str = ""
    _cut: bool = False
    _turns: int = 0
    _forks: int = 0
    _calls: int = 0

    async def generate(
        self,
        messages: Sequence[Message] | None = None,
        tokens: Sequence[int] | None = None,
        max_tokens: int | None = None,
    ) -> Turn:
        """Generate one turn, see `Policy`."""
        if (messages is None) == (tokens is None):
            raise ValueError("generate takes either messages or tokens")
        if messages is not None:
            self._give_messages(messages)
        else:
            self._give(tuple(tokens or ()))
        left = self._tokens_left()
        if self._turns >= self.context.limits.turns or left <= 0:
            self.limit = "truncated"
            raise EpisodeLimitError("the episode has no turn or no token left")
        bounds = (left, self.context.limits.turn_tokens, max_tokens)
        output = await self._sample(min(bound for bound in bounds if bound is not None))
        turn = await self._as_turn(output)
        self._record(output, turn)
        return turn

    def episode(
        self,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        state: EpisodeState | None = None,
    ) -> Episode:
        """Return what was recorded as an episode; without `state` it is truncated where its last turn was cut."""
        return Episode(
            tuple(self._segments),
            reward,
            dict(metrics or {}),
            state or ("truncated" if self._cut else "completed"),
            self._answer,
            tuple(self._messages[self._prompt_messages :]),
            self._turns,
            self._forks,
            self._experts,
        )

    def _give_messages(self, messages: Sequence[Message]) -> None:
        """Take a conversation over; render only what follows the last turn, where it goes on from there."""
        known = len(self._messages)
        new = messages[known:]
        goes_on = known > 0 and [*map(_said, messages[:known])] == [*map(_said, self._messages)]
        if goes_on and not any(message["role"] == "assistant" for message in new):
            renderer = self.context.renderer
            given = [{**message, "content": renderer.clean(str(message["content"]))} for message in new]
            self._append(renderer.continuation(self._tokens, given))
        else:
            is_task = tuple(messages) == self.prompt.messages
            self._begin(self.prompt.tokens if is_task else self.context.renderer.prompt(messages))
            self._prompt_messages = len(messages)
        self._messages = list(messages)

    def _give(self, tokens: tuple[int, ...]) -> None:
        known = len(self._tokens)
        if known and tokens[:known] == self._tokens:
            self._append(tokens[known:])
        else:
            self._begin(tokens)

    def _begin(self, prompt: tuple[int, ...]) -> None:
        """Begin a sequence; the one before, if any, is dropped."""
        self._forks += bool(self._segments)
        self._segments, self._tokens, self._experts = [Segment(prompt, generated=False)], prompt, None

    def _append(self, tokens: tuple[int, ...]) -> None:
        if tokens:
            self._segments.append(Segment(tokens, generated=False))
            self._tokens += tokens

    def _tokens_left(self) -> int:
        return self.context.sampling.max_response_tokens - (len(self._tokens) - len(self._segments[0].tokens))

    async def _sample(self, max_tokens: int) -> EngineOutput:
        """Generate after the tokens so far; the episode's clock stands still: a hanging engine is no slow episode."""
        context, deadline = self.context, self.clock.when()
        sampling = replace(context.sampling, max_response_tokens=max_tokens)
        self.clock.reschedule(None)
        try:
            (output,) = await context.client.generate(self._tokens, sampling, routing=context.routing)
        except EngineError as error:
            self.stopped_by = error
            raise
        finally:
            self.clock.reschedule(deadline)
        if output.aborted:
            self.stopped_by = EpisodeAbortedError()
            raise self.stopped_by
        return output

    async def _as_turn(self, output: EngineOutput) -> Turn:
        decode, tools = self.context.renderer.tokenizer.decode, self.context.renderer.tools
        text, calls = decode(output.tokens, skip_special_tokens=True), list[tuple[str, str]]()
        if tools and self.context.tool_parser and not output.truncated:
            raw = decode(output.tokens)  # calls of many models are written in special tokens
            rest, calls = await self.context.client.parse_tool_calls(raw, tools, self.context.tool_parser)
            text = self.context.renderer.clean(rest).strip() if calls else text
        return Turn(
            output.tokens,
            output.logprobs,
            output.weight_versions,
            text,
            not output.truncated,
            tuple(self._tool_calls(calls)),
            output.routed_experts,
        )

    def _tool_calls(self, calls: Sequence[tuple[str, str]]) -> Iterator[ToolCall]:
        for name, text in calls:
            arguments = _arguments(text)
            if arguments is not None:
                yield ToolCall(name, arguments, f"functions.{name}:{self._calls}")  # as Kimi-K2 numbers them
                self._calls += 1

    def _record(self, output: EngineOutput, turn: Turn) -> None:
        goes_on = any(segment.generated for segment in self._segments)
        self._experts = joined_routed_experts(self._experts, output.routed_experts, goes_on)
        self._segments.append(Segment(output.tokens, True, output.logprobs, output.weight_versions))
        self._tokens += output.tokens
        self._turns += 1
        self._answer, self._cut = turn.text, not turn.finished
        self._messages.append(turn.message)


def _said(message: Message) -> tuple[object, object]:
    return message["role"], message["content"]


def _arguments(text: str) -> dict[str, object] | None:
    """Read the arguments of a call; None where they are no JSON object."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None
