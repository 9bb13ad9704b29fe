"""Requests and answers of OpenAI's chat completions, and what of them an episode can do."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mp.episodes.protocol import Policy, Turn
from grpo_mp.types import Message

MODEL = "policy"  # any name is accepted
ONE_ANSWER: Mapping[str, tuple[Any, ...]] = {"n": (1,)}
# Parameters that would change how tokens are drawn or shown, with the values that do not.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "seed": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
}


class RequestError(Exception):
    """A request that is answered by status 400 and this sentence."""


@dataclass(frozen=True)
class ChatRequest:
    """A request for one turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    ignored: tuple[str, ...] = ()  # parameters for other sampling than the run's


def read_request(body: Any, policy: Policy, ignores_sampling: bool = False) -> ChatRequest:
    """Read the JSON of a request. Raises RequestError for what is no request.

    That it asks for other sampling than the run's is ignored or, without `ignores_sampling`, such an error too.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    _check_sampling(body, ONE_ANSWER)
    drawn = {"temperature": (policy.temperature,), "top_p": (policy.top_p,), **NEUTRAL}
    if not ignores_sampling:
        _check_sampling(body, drawn)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with one message or more")
    bounds = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if any(type(bound) is not int or bound < 1 for bound in bounds):
        raise RequestError("max_tokens and max_completion_tokens must be whole numbers from 1 on")
    tools = body.get("tools")
    if not (tools is None or (isinstance(tools, list) and all(map(_is_tool, tools)))):
        raise RequestError("tools must be a list of functions, each with a name and, as an object, its parameters")
    return ChatRequest(
        tuple(map(_read_message, messages)),
        None if tools is None else tuple(tools),
        min(bounds, default=None),
        _read_stop(body.get("stop")),
        bool(body.get("stream")),
        tuple(_other_sampling(body, drawn)),
    )


def completion(turn: Turn, prompt_tokens: int) -> dict[str, Any]:
    """Return a turn as a `chat.completion`."""
    reason = "length" if not turn.finished else "tool_calls" if turn.tool_calls else "stop"
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None if turn.tool_calls else turn.text}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in turn.tool_calls
        ]
    count = len(turn.tokens)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count},
    }


def as_stream(answer: Mapping[str, Any]) -> str:
    """Return a `chat.completion` as server-sent events: one chunk with all of it."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    chunk = {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
    event = {**answer, "object": "chat.completion.chunk", "choices": [chunk]}
    return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _check_sampling(body: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> None:
    for name in _other_sampling(body, accepted):
        allowed = " or ".join(["leave it out", *(f"set {json.dumps(value)}" for value in accepted[name])])
        raise RequestError(f"{name}={json.dumps(body[name])}: all turns are sampled as the run says: {allowed}")


def _other_sampling(body: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the names of parameters with other values than are accepted."""
    return [name for name, values in accepted.items() if body.get(name) is not None and body[name] not in values]


def _read_stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise RequestError("stop must be a text, or a list of texts")
    return tuple(filter(None, texts))


def _is_tool(tool: Any) -> bool:
    """Return whether the engine's parser can read a tool: it would fail on others after the turn."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    description, parameters = function.get("description") or "", function.get("parameters") or {}
    return (
        isinstance(description, str)
        and isinstance(parameters, dict)
        and isinstance(parameters.get("properties") or {}, dict)
    )


def _read_message(message: Any) -> Message:
    """Return a message with text as its content, and the arguments of its calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("a message must be an object with a role")
    read = {name: value for name, value in message.items() if value is not None}
    read["content"] = _text(message.get("content"))
    if read["role"] == "developer":
        read["role"] = "system"
    if "tool_calls" in read:
        calls = read["tool_calls"]
        read["tool_calls"] = [_read_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return read


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise RequestError("the content of a message must be text, or a list of text parts")
    return "".join(part["text"] for part in parts)


def _read_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"id": call.get("id", ""), "type": "function", "function": {"name": function["name"], "arguments": read}}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError("a tool call must have a function with a name and arguments in JSON") from error
