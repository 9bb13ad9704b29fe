"""Conversion of Anthropic Messages requests to turns of an episode, and of turns to responses."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PositiveInt, Tag

from grpo_mp.rollout.openai_requests import MODEL, ChatRequest, parse_request
from grpo_mp.rollout.protocol import Turn, function_schema

# Further parameters that do not affect the sampled tokens.
NO_MATTER = frozenset({"betas", "container", "context_management", "inference_geo", "mcp_servers", "diagnostics"})
THINKING = ("thinking", "redacted_thinking")  # not in responses: thoughts are a part of the text


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_Text] = ""


class _Thinking(BaseModel):
    type: Literal["thinking", "redacted_thinking"]


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else getattr(block, "type", None)
    return "thinking" if kind in THINKING else str(kind)


_Block = Annotated[
    Annotated[_Text, Tag("text")]
    | Annotated[_ToolUse, Tag("tool_use")]
    | Annotated[_ToolResult, Tag("tool_result")]
    | Annotated[_Thinking, Tag("thinking")],
    Discriminator(_kind),
]


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(BaseModel):
    name: str
    description: str = ""
    input_schema: dict[str, Any]


class MessagesRequest(BaseModel):
    """The body of `POST /v1/messages`, and of `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow")
    messages: list[_Message] = Field(min_length=1)
    system: str | list[_Text] = ""
    tools: list[_Tool] = []
    max_tokens: PositiveInt | None = None
    stop_sequences: list[str] = []
    stream: bool | None = None

    def as_chat(self) -> ChatRequest:
        """Return the request in OpenAI's form."""
        messages = [{"role": "system", "content": _as_text(self.system)}] if self.system else []
        for message in self.messages:
            messages += _as_messages(message)
        extra = {name: value for name, value in (self.model_extra or {}).items() if name not in NO_MATTER}
        chat = {
            "messages": messages,
            "tools": [function_schema(one.name, one.description, one.input_schema) for one in self.tools or ()] or None,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
        }
        return ChatRequest.model_validate(extra | chat)


def read_request(text: str | bytes) -> ChatRequest:
    """Parse the JSON body of a request. Raises RequestError for an invalid or unsupported request."""
    return parse_request(MessagesRequest, text).as_chat()


def _as_text(content: str | Sequence[_Text]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _as_messages(message: _Message) -> list[dict[str, Any]]:
    """Return the chat messages of a message: each result of a tool is a message, before the text beside them."""
    blocks = [_Text(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _as_text(block.content)}
        for block in blocks
        if isinstance(block, _ToolResult)
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, _ToolUse)
    ]
    texts = [block for block in blocks if isinstance(block, _Text)]
    if results and not texts:
        return results
    said: dict[str, Any] = {"role": message.role, "content": _as_text(texts)}
    return [*results, said | ({"tool_calls": calls} if calls else {})]


def response(turn: Turn, prompt_tokens: int) -> dict[str, Any]:
    """Return a turn as a message. `prompt_tokens`: number of tokens before the turn."""
    ends = "stop_sequence" if turn.stopped_by else "end_turn"
    reason = "max_tokens" if not turn.finished else "tool_use" if turn.tool_calls else ends
    content: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text or not turn.tool_calls else []
    for call in turn.tool_calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": turn.stopped_by if reason == "stop_sequence" else None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": len(turn.tokens)},
    }


def as_stream(answer: Mapping[str, Any]) -> str:
    """Return a message as server-sent events, each of its blocks in one piece."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in _events(answer))


def _events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    usage = answer["usage"]
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": {**answer, **begun}}
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty = block | {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return an error response in Anthropic's format, which has a kind for keys of no episode, and no codes."""
    kind = {"invalid_api_key": "authentication_error"}.get(code or "", kind)
    return {"type": "error", "error": {"type": "api_error" if kind == "server_error" else kind, "message": message}}
