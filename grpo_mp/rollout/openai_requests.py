"""Requests and answers of OpenAI's chat completions, and what of them an episode can do."""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mp.rollout.protocol import Policy, Turn
from grpo_mp.utils.errors import did_you_mean
from grpo_mp.utils.types import Message

MODEL = "policy"  # any name is accepted
READ = ("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream")
# What clients send by themselves and no token depends on: accounts, caches and logs of a service.
NO_MATTER = (
    *("store", "metadata", "user", "safety_identifier", "service_tier", "stream_options"),
    *("prompt_cache_key", "prompt_cache_retention", "max_tool_calls"),  # the last: of tools that a service runs
)
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
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "modalities": (["text"],),
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
    ignored: tuple[str, ...] = ()  # parameters that no turn here can follow


def read_request(body: Any, policy: Policy, ignores_sampling: bool = False) -> ChatRequest:
    """Read the JSON of a request. Raises RequestError for malformed requests.

    Requests for other sampling than the run's, and unknown parameters, raise RequestError too unless
    `ignores_sampling`.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if body.get("functions"):
        raise RequestError("functions: give them as tools")
    ignored = _check_sampling(body, policy, ignores_sampling)
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
        max_tokens=min(bounds, default=None),
        stop=_read_stop(body.get("stop")),
        stream=bool(body.get("stream")),
        ignored=ignored,
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


def _check_sampling(body: Mapping[str, Any], policy: Policy, ignores_sampling: bool) -> tuple[str, ...]:
    """Return the names of the parameters that are ignored. Raises RequestError where they may not be."""
    accepted = {"n": (1,), "temperature": (policy.temperature,), "top_p": (policy.top_p,), **NEUTRAL}
    unknown = body.keys() - accepted.keys() - {*READ, *NO_MATTER}
    other = [
        name
        for name in (*accepted, *sorted(unknown))
        if not _is_empty(body.get(name)) and body[name] not in accepted.get(name, ())
    ]
    for name in other:
        if ignores_sampling and name != "n":
            continue
        if name not in accepted:
            near = did_you_mean(name[:80], (*READ, *accepted))
            raise RequestError(f"{name:.80}: no turn here can follow this parameter{near}: leave it out")
        allowed = " or ".join(["leave it out", *(f"set {json.dumps(value)}" for value in accepted[name])])
        raise RequestError(f"{name}={json.dumps(body[name]):.200}: all turns are sampled as the run says: {allowed}")
    return tuple(name[:80] for name in other)


def _is_empty(value: Any) -> bool:
    """Return whether a parameter says nothing, as clients write it that send all of them."""
    return value is None or value in ([], {}) or (isinstance(value, dict) and all(map(_is_empty, value.values())))


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
        read = _read_arguments(function["arguments"])
        return {"id": call.get("id", ""), "type": "function", "function": {"name": function["name"], "arguments": read}}
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            "a tool call must have a function with a name and arguments, as text or an object"
        ) from error


def _read_arguments(arguments: Any) -> Mapping[str, Any]:
    """Return arguments as Turn.message has them: templates write objects, and {} for a text that is no JSON of one.

    Raises TypeError for what is neither text nor object.
    """
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            read = None
        return read if isinstance(read, dict) else {}
    if not isinstance(arguments, dict):
        raise TypeError
    return arguments
