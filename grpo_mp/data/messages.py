"""Chat messages of data rows: read their fields, and convert tool calls and thinking to a chat template's form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.data.rows import without_nulls
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import shorten
from grpo_mp.utils.types import Message

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
NAME, KEY = "call7F3A", "key7F3A"  # of a test call, which shows the form that a template renders


def read_message(value: Mapping[str, Any], location: str) -> Message:
    """Normalize a message: remove nulls, make its content text, and make the arguments of its tool calls objects.

    ShareGPT's `from` and `value` become role and content. A message with tool calls needs no content.
    """
    message: Message = _with_role_and_text(without_nulls(value))
    role = message.get("role")
    content = message.get("content")
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        message.setdefault("content", "")
    if role not in ROLES or not isinstance(message.get("content"), str):
        found = f"role {shorten(repr(role))} and content {shorten(repr(content))}" if role else shorten(repr(message))
        raise UserError(f"{location}: a message needs role ({', '.join(ROLES)}) and text content, found {found}")
    return message | ({"tool_calls": [_with_object(call) for call in calls]} if isinstance(calls, list) else {})


def read_messages(value: Any, location: str, role: str = "") -> list[Message]:
    """Return the messages of a column. `role`: converts a plain text to one message of that role; "": refuses it."""
    chat = [{"role": role, "content": value}] if role and isinstance(value, str) else value
    if not isinstance(chat, list) or not chat or not all(isinstance(message, Mapping) for message in chat):
        raise UserError(f"{location}: expected {'text or ' if role else ''}a list of chat messages")
    return [read_message(message, location) for message in chat]


def as_template_reads(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """Convert tool calls and thinking of messages to the form that the tokenizer's chat template renders."""
    messages = [_with_reasoning_content(message) for message in messages]
    if not any(message.get("tool_calls") for message in messages):
        return messages
    form = call_form(tokenizer, str(tokenizer.chat_template))
    return [form.apply(message) if message.get("tool_calls") else message for message in messages]


def name_of_call(call: Any) -> str:
    """Return the name of the function in a tool call; "" if there is none."""
    name = _function(call).get("name")
    return name if isinstance(name, str) else ""


@dataclass(frozen=True)
class CallForm:
    """Form of tool calls that a chat template renders; DeepSeek-R1's needs null content and arguments as text."""

    content_is_null: bool
    arguments_are_text: bool

    def apply(self, message: Message) -> Message:
        """Return the message with its tool calls in this form."""
        calls = message["tool_calls"]
        if self.arguments_are_text and isinstance(calls, list):
            calls = [_with_text(call) for call in calls]
        is_null = self.content_is_null and not message.get("content")
        return {**message, "tool_calls": calls, **({"content": None} if is_null else {})}


@lru_cache(maxsize=16)
def call_form(tokenizer: PreTrainedTokenizerBase, template: str) -> CallForm:
    """Return the first form of calls that the template renders completely, else the default; `template`: cache key."""
    forms = [CallForm(is_null, is_text) for is_text in (False, True) for is_null in (False, True)]
    return next((form for form in forms if _is_written(form, tokenizer)), forms[0])


def _with_role_and_text(message: Message) -> Message:
    """Convert a ShareGPT message, or content that is a list of text parts, to role and text content."""
    if "role" not in message and {"from", "value"} <= message.keys():
        renamed = {{"from": "role", "value": "content"}.get(name, name): item for name, item in message.items()}
        message = renamed | {"role": SHAREGPT_ROLES.get(str(message["from"]), message["from"])}
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    return message | {"content": "".join(map(str, texts))} if all(isinstance(one, str) for one in texts) else message


def _is_written(form: CallForm, tokenizer: PreTrainedTokenizerBase) -> bool:
    call = {"id": "call7F3A0", "type": "function", "function": {"name": NAME, "arguments": {KEY: 1}}}
    messages = [
        {"role": "user", "content": "question"},
        form.apply({"role": "assistant", "content": "", "tool_calls": [call]}),
    ]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program
        return False
    # A Python repr of the arguments, or JSON inside of a JSON string, is not a complete rendering.
    return NAME in text and KEY in text and f"'{KEY}'" not in text and f'\\"{KEY}' not in text


def _with_object(call: Any) -> Any:
    """Parse the arguments of a tool call if they are JSON text of an object."""
    arguments = _function(call).get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        read = json.loads(arguments)
    except ValueError:
        return call
    return _with_arguments(call, read) if isinstance(read, dict) else call


def _with_text(call: Any) -> Any:
    arguments = _function(call).get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    return _with_arguments(call, json.dumps(arguments, ensure_ascii=False))


def _with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


# Fields that turn the loss of a message on or off: OpenAI (weight), ms-swift (loss), slime (loss_mask, step_loss_mask),
# axolotl (train, training, train_on_turn), verl (trainable).
SWITCHES = ("weight", "loss", "loss_mask", "step_loss_mask", "train", "training", "trainable", "train_on_turn")


THINKING = ("reasoning_content", "reasoning", "thinking")


def is_learned(answer: Message) -> bool:
    """Return whether an assistant's message is trained on, by its fields in SWITCHES."""
    values = {name: answer[name] for name in SWITCHES if name in answer}
    for name, value in values.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise UserError(f"{name} of an answer must be true or false, or 1 or 0, not {str(value)[:50]!r}")
    return all(values.values())


def thinking_texts(message: Message) -> list[tuple[str, str]]:
    """Return (field, text) for each field of a message that holds thinking."""
    return [(name, text) for name in THINKING if isinstance(text := message.get(name), str)]


def _with_reasoning_content(message: Message) -> Message:
    """Move an answer's thinking to the field `reasoning_content`, which chat templates render."""
    given = next((name for name in THINKING if message.get(name)), THINKING[0])
    if given == THINKING[0] or message["role"] != "assistant":
        return message
    return {name: value for name, value in message.items() if name != given} | {THINKING[0]: message[given]}
