"""Requests and answers of OpenAI's Responses API, as those of chat completions: one turn of an episode each."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_mp.rollout.openai_requests import MODEL, NEUTRAL, ChatRequest, RequestError, read_request
from grpo_mp.rollout.protocol import Policy, Turn
from grpo_mp.utils.types import Message

Json = dict[str, Any]
TEXT_FORMAT: Json = {"type": "text"}
ELSEWHERE = ("conversation", "prompt")  # what names texts that a service keeps
OTHER_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
READ = ("input", "instructions", "previous_response_id", "background", "max_output_tokens", "text", "tools")
# As those of chat completions. No answer has reasoning of its own: to ask for all of it encrypted changes nothing.
RESPONSES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: values for name, values in NEUTRAL.items() if name not in ("response_format", "verbosity")},
    "text.format": (TEXT_FORMAT,),
    "text.verbosity": ("medium",),
    "truncation": ("disabled",),
    "reasoning": (),
    "include": (["reasoning.encrypted_content"],),
}


def read_response_request(
    body: Any, known: Mapping[str, Sequence[Message]], policy: Policy, ignores_sampling: bool = False
) -> tuple[ChatRequest, tuple[Message, ...]]:
    """Read the JSON of a request; return it as one of chat completions, and its conversation without instructions.

    `known`: conversations up to the answers before, by their ids. Raises RequestError as `read_request` does.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if named := next((name for name in ELSEWHERE if body.get(name) is not None), None):
        raise RequestError(f"{named}: nothing is kept here: send the messages as input")
    if other := next((name for name in OTHER_NAMES if body.get(name) is not None), None):
        raise RequestError(f"{other}: give {OTHER_NAMES[other]}, as it is named here")
    if body.get("background"):
        raise RequestError("background=true: an answer comes with its request: leave it out")
    before = body.get("previous_response_id")
    if before is not None and (not isinstance(before, str) or before not in known):
        raise RequestError(f"previous_response_id={before!r:.80}: no answer of this episode has it")
    instructions = body.get("instructions")
    if not (instructions is None or isinstance(instructions, str)):
        raise RequestError("instructions must be a text")
    opening = [{"role": "system", "content": instructions}] if instructions else []
    wanted = body.get("text") or {}
    if not isinstance(wanted, dict):
        raise RequestError("text must be an object")
    chat = {name: value for name, value in body.items() if name not in READ}
    chat |= {f"text.{name}": value for name, value in wanted.items()}
    chat |= {
        "messages": [*opening, *known.get(before or "", ()), *_messages(body.get("input"))],
        "max_tokens": body.get("max_output_tokens"),
        "tools": _tools(body.get("tools")),
    }
    try:
        request = read_request(chat, policy, ignores_sampling, RESPONSES_NEUTRAL)
    except RequestError as error:
        raise RequestError(str(error).replace("max_tokens and max_completion_tokens", "max_output_tokens")) from error
    return request, request.messages[len(opening) :]


def response(turn: Turn, prompt_tokens: int, request: ChatRequest, policy: Policy) -> Json:
    """Return a turn as a `response`."""
    count, cut = len(turn.tokens), not turn.finished
    status = "incomplete" if cut else "completed"
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": MODEL,
        "output": list(_output(turn, status)),
        "parallel_tool_calls": True,
        "temperature": policy.temperature,
        "text": {"format": TEXT_FORMAT},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools or ()],
        "top_p": policy.top_p,
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + count,
        },
    }


def as_events(answer: Json) -> str:
    """Return a `response` as the server-sent events that clients put together: each item at once."""
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[Json] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(answer["output"]):
        is_message = item["type"] == "message"
        place = {"item_id": item["id"], "output_index": index}
        empty: Json = {"content": []} if is_message else {"arguments": ""}
        opened = {**item, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        events += _of_text(item, place) if is_message else _of_call(item, place)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    ended = "response.completed" if answer["status"] == "completed" else "response.incomplete"
    events.append({"type": ended, "response": answer})
    numbered = ({**event, "sequence_number": number} for number, event in enumerate(events))
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in numbered)


def _of_text(item: Json, place: Json) -> list[Json]:
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    return [
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
    ]


def _of_call(item: Json, place: Json) -> list[Json]:
    arguments = item["arguments"]
    return [
        {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
        {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments},
    ]


def _output(turn: Turn, status: str) -> Iterator[Json]:
    if turn.text or not turn.tool_calls:
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
        yield {"id": _id("msg"), "type": "message", "status": status, "role": "assistant", "content": [part]}
    for call in turn.tool_calls:
        yield {
            "id": _id("fc"),
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments_text,
        }


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _messages(given: Any) -> list[Json]:
    """Return input items as messages of chat completions; calls belong to the answer before them."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise RequestError("input must be a text, or a list with one item or more")
    messages, is_answer = list[Json](), False  # whether the last message is one to which a call may belong
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            is_answer = item.get("role") == "assistant"
        elif kind == "function_call":
            if not is_answer:
                messages.append({"role": "assistant", "content": ""})
                is_answer = True
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), call]
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            is_answer = False
        elif kind != "reasoning":  # which no answer here has: another model's
            raise RequestError(f"input: an item of type {kind!r:.40}: give messages, function calls and their outputs")
    return messages


def _tools(given: Any) -> list[Json] | None:
    if given is None:
        return None
    if not (
        isinstance(given, list) and all(isinstance(tool, dict) and tool.get("type") == "function" for tool in given)
    ):
        raise RequestError("tools must be a list of functions: no other tools are here")
    names = ("name", "description", "parameters")
    functions = ({name: tool[name] for name in names if tool.get(name) is not None} for tool in given)
    return [{"type": "function", "function": function} for function in functions]
