"""Conversion of OpenAI chat-completion requests to turns of an episode, and of turns to responses."""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    WrapValidator,
)

from grpo_mp.rollout.protocol import Policy, Turn
from grpo_mp.utils.reading import json_object
from grpo_mp.utils.types import Message

Request = TypeVar("Request", bound=BaseModel)
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


def _as_object(arguments: Any) -> Any:
    """Parse the arguments of a tool call; return {} if they are not a JSON object."""
    parsed = json_object(arguments) if isinstance(arguments, str) else arguments
    return parsed if isinstance(parsed, dict) else {}


class _Text(BaseModel):
    text: str


def _as_text(content: str | list[_Text] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _check_only(value: Any, check: Callable[[Any], Any]) -> Any:
    check(value)
    return value


class _Function(BaseModel):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_as_object)]


class _Call(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Annotated[str, AfterValidator(lambda role: "system" if role == "developer" else role)]
    content: Annotated[str | list[_Text] | None, AfterValidator(_as_text)] = ""
    tool_calls: list[_Call] | None = None


class _Parameters(BaseModel):
    properties: dict[str, Any] | None = None


class _Schema(BaseModel):
    name: str
    description: str | None = None
    parameters: _Parameters | None = None


class _Tool(BaseModel):
    function: _Schema


class ChatRequest(BaseModel):
    """A request for one turn."""

    model_config = ConfigDict(extra="allow")
    messages: list[_Message] = Field(min_length=1)
    tools: Annotated[list[_Tool] | None, WrapValidator(_check_only)] = None  # stay dicts, for the chat template
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Annotated[list[str], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop or [])] = []
    stream: bool | None = None
    n: Literal[1] | None = None

    async def generate(self, policy: Policy, role: str) -> Turn:
        return await policy.generate(
            self._messages(),
            max_tokens=min(filter(None, (self.max_completion_tokens, self.max_tokens)), default=None),
            tools=self._tools(),
            stop=[*filter(None, self.stop)],
            role=role,
        )

    def count_tokens(self, policy: Policy) -> int:
        """Return the number of tokens after which the turn would be generated."""
        return policy.count_tokens(self._messages(), self._tools())

    def _messages(self) -> list[Message]:
        return [message.model_dump() for message in self.messages]

    def _tools(self) -> list[dict[str, Any]] | None:
        return cast("list[dict[str, Any]] | None", self.tools)

    def ignored(self, policy: Policy) -> list[str]:
        """Return the names of parameters that differ from the run's sampling and are ignored."""
        sampled = {"temperature": policy.temperature, "top_p": policy.top_p}
        others = {name: value for name, value in (self.model_extra or {}).items() if name not in NO_MATTER}
        return [name[:80] for name, value in others.items() if value is not None and value != sampled.get(name)]


def read_request(text: str | bytes) -> ChatRequest:
    """Parse the JSON body of a request. Raises RequestError for an invalid or unsupported request."""
    return parse_request(ChatRequest, text)


def parse_request(form: type[Request], text: str | bytes) -> Request:
    """Parse the JSON body of a request of one form. Raises RequestError, which names the first wrong field."""
    try:
        return form.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RequestError(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from error


def response(turn: Turn, prompt_tokens: int) -> dict[str, Any]:
    """Return a turn as a `chat.completion` response. `prompt_tokens`: number of tokens before the turn."""
    reason = "length" if not turn.finished else "tool_calls" if turn.tool_calls else "stop"
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None if turn.tool_calls else turn.text}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.text or json.dumps(dict(call.arguments))},
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
