"""Conversion of OpenAI chat-completion requests to turns of an episode, and of turns to responses."""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from grpo_mp.rollout.protocol import Policy, Turn
from grpo_mp.utils.types import Message

MODEL = "policy"  # model name in responses; requests may have any name
# Parameters that clients send by default and that do not affect the sampled tokens, ignored without a warning.
NO_MATTER = frozenset(
    {
        *("model", "store", "metadata", "user", "safety_identifier", "service_tier", "stream_options"),
        *("prompt_cache_key", "prompt_cache_retention", "tool_choice", "parallel_tool_calls"),
    }
)


class RequestError(Exception):
    """An invalid request, answered with status 400 and the exception's message."""


class _Text(BaseModel):
    text: str


class _Called(BaseModel):
    name: str
    arguments: str | dict[str, Any]


class _Call(BaseModel):
    id: str = ""
    function: _Called

    def as_call(self) -> dict[str, Any]:
        """Return the call in the format of Turn.message: arguments as a dict, {} if they are not a JSON object."""
        arguments: Any = self.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        function = {"name": self.function.name, "arguments": arguments if isinstance(arguments, dict) else {}}
        return {"id": self.id, "type": "function", "function": function}


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[_Text] | None = None
    tool_calls: list[_Call] | None = None

    def as_message(self) -> Message:
        """Return the message with a string as content and with the arguments of tool calls as dicts."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        message |= {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.as_call() for call in self.tool_calls]
        return message


class _Parameters(BaseModel):
    properties: dict[str, Any] | None = None


class _Function(BaseModel):
    name: str
    description: str | None = None
    parameters: _Parameters | None = None


class _Tool(BaseModel):
    function: _Function


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    n: Literal[1] | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A parsed request for one turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    ignored: tuple[str, ...] = ()  # names of parameters that differ from the run's sampling and are ignored


def read_request(text: str | bytes, policy: Policy) -> ChatRequest:
    """Parse the JSON body of a request. Raises RequestError for an invalid or unsupported request."""
    try:
        body = _Body.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from error
    sampled = {"temperature": policy.temperature, "top_p": policy.top_p}
    ignored = [
        name
        for name, value in (body.model_extra or {}).items()
        if name not in NO_MATTER and value is not None and value != sampled.get(name)
    ]
    tools = json.loads(text).get("tools")  # the unparsed schemas: the chat template may render any of their fields
    return ChatRequest(
        tuple(message.as_message() for message in body.messages),
        None if tools is None else tuple(tools),
        max_tokens=min(filter(None, (body.max_completion_tokens, body.max_tokens)), default=None),
        stop=tuple(filter(None, [body.stop] if isinstance(body.stop, str) else body.stop or [])),
        stream=bool(body.stream),
        ignored=tuple(name[:80] for name in ignored),
    )


def completion(turn: Turn, prompt_tokens: int) -> dict[str, Any]:
    """Return a turn as a `chat.completion` response. `prompt_tokens`: number of tokens before the turn."""
    reason = "length" if not turn.finished else "tool_calls" if turn.tool_calls else "stop"
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None if turn.tool_calls else turn.text}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_text},
            }
            for call in turn.tool_calls
        ]
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(turn.tokens),
            "total_tokens": prompt_tokens + len(turn.tokens),
        },
    }


def as_stream(answer: Mapping[str, Any]) -> str:
    """Return a `chat.completion` as server-sent events: a single chunk with the whole response."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    chunk = {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
    event = {**answer, "object": "chat.completion.chunk", "choices": [chunk]}
    return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return an error response in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
