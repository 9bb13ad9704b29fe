"""Policy handle of one episode: renders new messages, generates on this rank's engine, records all tokens."""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Any

from grpo_mp.config.sections import EpisodeLimits
from grpo_mp.config.truncation import truncation_of
from grpo_mp.data import harmony
from grpo_mp.data.template import ChatRenderer, answer_texts
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.protocol import Episode, EpisodeLimitError, RecordedSequence, Segment, ToolCall, Turn
from grpo_mp.rollout.routed_experts import joined_routed_experts, known_tokens
from grpo_mp.utils.errors import EngineError
from grpo_mp.utils.reading import json_object
from grpo_mp.utils.types import EpisodeState, ExpertIds, Message, Prompt

# End markers of thinking, from SGLang's reasoning parsers.
THINKING_END = re.compile(r"</(?:\w+[:|])?think\w*>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>")


class EpisodeAbortedError(Exception):
    """The engine aborted this episode's request, because the step has enough groups."""


@dataclass(frozen=True)
class EpisodeContext:
    """Engine, renderer, limits and sampling parameters that the episodes of a group share."""

    client: EngineClient
    renderer: ChatRenderer
    limits: EpisodeLimits
    sampling: SamplingParams  # `max_response_tokens`: limit of all tokens after the prompt, given tokens included
    max_prompt_tokens: int
    tool_parser: str | None
    routing: ModelShape | None


@dataclass
class EpisodeWatch:
    """State that all handles of an episode share. `clock`: time limit of the episode, stopped while a handle generates.

    `stopped_by`: the error that ended the episode, kept in case the rollout function catches it.
    """

    clock: asyncio.Timeout
    stopped_by: EngineError | EpisodeAbortedError | None = None
    handles: int = 0  # number of unrecorded handles so far
    generated_s: float = 0.0  # time in which a handle generated
    calls_s: dict[str, list[float]] = field(default_factory=dict)  # seconds of each tool call, by the tool's name
    _generating: int = 0
    _deadline: float | None = None
    _since: float = 0.0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Stop the clock while the body generates, so that a slow engine does not time out the episode."""
        now = asyncio.get_running_loop().time
        if not self._generating:
            self._deadline = self.clock.when()
            self._since = now()
            self.clock.reschedule(None)
        self._generating += 1
        try:
            yield
        except (EngineError, EpisodeAbortedError) as error:
            self.stopped_by = error
            raise
        finally:
            self._generating -= 1
            if not self._generating and self._deadline is not None:
                passed_s = now() - self._since
                self.generated_s += passed_s
                self.clock.reschedule(self._deadline + passed_s)


@dataclass(frozen=True)
class TokenSequence:
    """Token sequence of an episode, as segments, with the messages and the tools from which it was rendered.

    `prompt_messages`: number of messages before the first generated turn.
    """

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...] = ()
    prompt_messages: int = 0
    renderer: ChatRenderer | None = None  # renderer of the messages, which has the tools
    experts: ExpertIds | None = field(default=None, compare=False, repr=False)
    role: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(segment.tokens for segment in self.segments))

    @property
    def has_turns(self) -> bool:
        return any(segment.generated for segment in self.segments)

    def followed_by(self, given: tuple[int, ...], messages: Sequence[Message]) -> "TokenSequence":
        """Append given tokens, if any. `messages`: the full conversation after them."""
        added = (Segment(given, generated=False),) if given else ()
        return replace(self, segments=(*self.segments, *added), messages=tuple(messages))

    def answered_by(self, turn: Turn, number: int) -> "TokenSequence":
        """Append a generated turn, and the routed experts of all tokens that have none yet.

        `number`: number of the turn in the episode.
        """
        known = known_tokens(self.experts, self.has_turns)
        experts = None if turn.routed_experts is None else turn.routed_experts[known:]
        segment = Segment(
            *(turn.tokens, True, turn.logprobs, turn.weight_versions),
            verify_steps=turn.verify_steps,
            turn=number,
            kept=turn.kept,
        )
        return replace(
            self,
            segments=(*self.segments, segment),
            messages=(*self.messages, turn.message),
            experts=joined_routed_experts(self.experts, experts, self.has_turns, resumed_tokens=1),
        )


@dataclass
class EpisodePolicy:
    """Implementation of the `Policy` protocol."""

    context: EpisodeContext
    prompt: Prompt
    watch: EpisodeWatch
    limit: EpisodeState | None = None  # state of the episode once a limit was reached
    _sequence: TokenSequence = field(init=False)
    _generates: bool = False
    _answer: str = ""
    _cut: bool = False
    turns: int = 0  # number of turns so far
    _earlier: list[TokenSequence] = field(default_factory=list)  # all other sequences, in order of their last turns
    _calls: int = 0  # number of tool calls so far

    def __post_init__(self) -> None:
        self._sequence = TokenSequence((Segment(self.prompt.tokens, generated=False),))

    @property
    def temperature(self) -> float:
        return self.context.sampling.temperature

    @property
    def top_p(self) -> float:
        return truncation_of(self.context.sampling.top_p).top_p

    async def generate(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Sequence[str] = (),
        role: str = "",
    ) -> Turn:
        """Generate one turn, see `Policy`. A failed call does not change the episode."""
        await asyncio.sleep(0)  # a function that retries after every EpisodeLimitError must not block the event loop
        if self._generates:
            raise ValueError("an episode generates one turn at a time: await the one before, or begin another episode")
        self._generates = True
        try:
            renderer = self._renderer(tools)
            before, given = self._after(messages, renderer, role)
            with self.watch.generating():
                output = await self._sample(given.tokens, self._bound(given, max_tokens), stop)
                turn = await self._as_turn(output, renderer, stop)
        finally:
            self._generates = False
        if self._sequence.has_turns and before is not self._sequence:
            self._earlier = [*(one for one in self._earlier if one is not before), self._sequence]
        self.turns += 1
        self._sequence = given.answered_by(turn, self.turns)
        self._answer = turn.text
        self._cut = not turn.finished
        return turn

    def episode(
        self,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        state: EpisodeState | None = None,
    ) -> Episode:
        """Return the recorded turns as an episode, see `Policy`."""
        return Episode(
            self._sequence.segments,
            reward,
            metrics=dict(metrics or {}),
            state=state or ("truncated" if self._cut else "completed"),
            answer=self._answer,
            messages=self._sequence.messages[self._sequence.prompt_messages :],
            turns=self.turns,
            forks=len(self._earlier) + 1 - len({one.role for one in (*self._earlier, self._sequence)}),
            routed_experts=self._sequence.experts,
            earlier=tuple(
                RecordedSequence(one.segments, one.experts, one.role, one.messages[one.prompt_messages :])
                for one in self._earlier
            ),
            role=self._sequence.role,
        )

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> int:
        _, given = self._after(messages, self._renderer(tools))
        return len(given.tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.context.renderer.tokenizer.decode(list(tokens)))

    def unrecorded(self) -> "EpisodePolicy":
        """Return a second handle whose turns are not trained on, see `Policy`."""
        self.watch.handles += 1
        own = replace(self.context, sampling=self.context.sampling.for_part("unrecorded", self.watch.handles))
        return EpisodePolicy(own, self.prompt, self.watch)

    @property
    def _recorded(self) -> Iterator[TokenSequence]:
        """Return the sequences that have generated turns, in reverse order of their last turns."""
        return (one for one in (self._sequence, *reversed(self._earlier)) if one.has_turns)

    def _after(
        self, messages: Sequence[Message], renderer: ChatRenderer, role: str = ""
    ) -> tuple[TokenSequence | None, TokenSequence]:
        """Return the role's recorded sequence that a conversation continues, if any, and the one to generate after.

        Of a continuation only the messages after the last turn are rendered.
        """
        messages = [_with_text(message) for message in messages]
        said = [*map(_said, messages)]

        def goes_on(before: TokenSequence) -> bool:
            known = len(before.messages)
            is_same = (renderer, role) == (before.renderer, before.role) and said[:known] == [
                *map(_said, before.messages)
            ]
            return is_same and not any(message["role"] == "assistant" for message in messages[known:])

        if before := max(filter(goes_on, self._recorded), key=lambda one: len(one.messages), default=None):
            new = _cleaned(messages[len(before.messages) :], renderer)
            calls = before.messages[-1].get("tool_calls") or ()
            return before, before.followed_by(renderer.continuation(before.tokens, new, calls), messages)
        is_task = renderer is self.context.renderer and tuple(messages) == self.prompt.messages
        asked = list(takewhile(lambda message: message["role"] != "assistant", messages))
        asked += _cleaned(messages[len(asked) :], renderer)
        prompt = self.prompt.tokens if is_task else renderer.prompt(asked)
        begun = TokenSequence((Segment(prompt, generated=False),), tuple(messages), len(messages), renderer, role=role)
        return None, begun

    def _renderer(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatRenderer:
        """Return the chat renderer for a turn's tools; None: the tools of `rollout.tools`."""
        if tools is None or tuple(tools) == self.context.renderer.tools:
            return self.context.renderer
        if tools and not self.context.tool_parser:
            raise ValueError(
                "tools need rollout.tool_parser, the name by which SGLang knows how the model writes calls"
            )
        return replace(self.context.renderer, tools=tuple(map(dict, tools)))

    def _bound(self, given: TokenSequence, max_tokens: int | None) -> int:
        """Return the token limit of the next turn. Raises EpisodeLimitError if no turn or no token is left."""
        context = self.context
        length = len(given.tokens)
        longest = context.sampling.max_response_tokens
        after_prompt = longest - (length - len(given.segments[0].tokens))
        left = min(after_prompt, context.max_prompt_tokens + longest - length)
        if self.turns >= context.limits.turns or left <= 0:
            self.limit = "truncated"
            raise EpisodeLimitError(
                f"the episode has no turn or no token left: {self.turns} turns of rollout.limits.turns="
                f"{context.limits.turns}, {length} tokens of rollout.max_prompt_tokens + max_response_tokens="
                f"{context.max_prompt_tokens + longest}"
            )
        return min(bound for bound in (left, context.limits.turn_tokens, max_tokens) if bound is not None)

    async def _sample(self, tokens: tuple[int, ...], max_tokens: int, stop: Sequence[str]) -> EngineOutput:
        context = self.context
        stops = (*self.context.sampling.stop, *stop)
        sampling = replace(context.sampling.for_part(self.turns), max_response_tokens=max_tokens, stop=stops)
        (output,) = await context.client.generate(tokens, sampling, routing=context.routing)
        if output.aborted:
            raise EpisodeAbortedError
        return output

    async def _as_turn(self, output: EngineOutput, renderer: ChatRenderer, stop: Sequence[str]) -> Turn:
        parser = self.context.tool_parser
        (text,) = answer_texts(renderer.tokenizer, [output.tokens])
        calls = list[tuple[str, str]]()
        stopped_by = min((end for end in stop if end in text), key=text.find, default=None)
        text = text.partition(stopped_by)[0] if stopped_by else text
        if renderer.tools and parser and not output.truncated:
            split = harmony.split_analysis if parser == harmony.PARSER else split_thinking
            thought, said = split(renderer.tokenizer.decode(output.tokens))  # tool calls may contain special tokens
            rest, calls = await self.context.client.parse_tool_calls(said, renderer.tools, parser)
            text = renderer.clean(thought + rest).strip() if calls else text
        return Turn(
            output.tokens,
            output.logprobs,
            weight_versions=output.weight_versions,
            text=text,
            finished=not output.truncated,
            tool_calls=tuple(self._tool_calls(calls)),
            routed_experts=output.routed_experts,
            verify_steps=output.verify_steps,
            kept=output.kept,
            stopped_by=stopped_by,
        )

    def _tool_calls(self, calls: Sequence[tuple[str, str]]) -> Iterator[ToolCall]:
        for name, text in calls:
            arguments = json_object(text)
            error = f"the arguments of {name} are no JSON object" if arguments is None else ""
            call_id = f"functions.{name}:{self._calls}"  # as Kimi-K2 numbers them
            yield ToolCall(name, arguments or {}, id=call_id, error=error, text=text)
            self._calls += 1


def split_thinking(text: str) -> tuple[str, str]:
    """Split a response after its last thinking block; only tool calls in the second part are executed."""
    end = max((match.end() for match in THINKING_END.finditer(text)), default=0)
    return text[:end], text[end:]


def _with_text(message: Message) -> Message:
    """Return a message with string content and without None values, which chat templates print or reject."""
    said = {name: value for name, value in message.items() if value is not None}
    return {**said, "content": str(said.get("content", ""))}


def _cleaned(messages: Sequence[Message], renderer: ChatRenderer) -> list[Message]:
    """Remove special tokens from all text fields of messages other than the assistant's."""
    return [message if message["role"] == "assistant" else _clean_texts(message, renderer) for message in messages]


def _clean_texts(message: Message, renderer: ChatRenderer) -> Message:
    texts = {name: text for name, text in message.items() if name != "role" and isinstance(text, str)}
    return {**message, **{name: renderer.clean(text) for name, text in texts.items()}}


def _said(message: Message) -> tuple[object, ...]:
    """Return the parts of a message that are compared to find the sequence that a conversation continues."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message["role"], message["content"], [(call["name"], call["arguments"]) for call in calls]
