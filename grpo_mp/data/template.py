"""Chat messages and templates: read messages of data rows, render conversations, and tokenize later turns."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_mp.data import harmony
from grpo_mp.data.rows import without_nulls
from grpo_mp.data.template_date import strftime_now
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import encodable
from grpo_mp.utils.reading import json_object, shorten
from grpo_mp.utils.types import Message

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Of a test call, which shows the form that a template renders
NAME = "call7F3A"
KEY = "key7F3A"


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
    field = thinking_field(tokenizer, str(tokenizer.chat_template))
    messages = [_with_thinking_in(message, field) for message in messages]
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
    read = json_object(arguments) if isinstance(arguments, str) else None
    return call if read is None else _with_arguments(call, read)


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


def _with_thinking_in(message: Message, field: str) -> Message:
    """Move the thinking of an answer to the field that the chat template renders."""
    given = next((name for name in THINKING if message.get(name)), None)
    if message["role"] != "assistant" or given == field:
        return message
    if given is None:
        return harmony.move_analysis(message) if field == harmony.FIELD else message
    return {name: value for name, value in message.items() if name != given} | {field: message[given]}


@lru_cache(maxsize=16)
def thinking_field(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the first field of THINKING that the template renders, else `reasoning_content`; `template`: cache key."""

    def is_written(field: str) -> bool:
        try:
            return GIVEN in str(tokenizer.apply_chat_template([FIXED[0], {**FIXED[1], field: GIVEN}], tokenize=False))
        except Exception:  # noqa: BLE001 - a template is a program
            return False

    return next(filter(is_written, THINKING), THINKING[0])


def answer_texts(tokenizer: PreTrainedTokenizerBase, answers: Sequence[Sequence[int]]) -> list[str]:
    """Decode answers for rewards and agents, without special tokens. Convert harmony answers by `plain_text`."""
    is_harmony = harmony.CHANNEL in tokenizer.get_added_vocab()
    texts = tokenizer.batch_decode([list(answer) for answer in answers], skip_special_tokens=not is_harmony)
    if not is_harmony:
        return list(texts)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    marks = re.compile("|".join(map(re.escape, special)))
    return [marks.sub("", harmony.plain_text(text)) for text in texts]


def render_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] = (),
    asks: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with the tokenizer's chat template; `asks` appends the generation prompt.

    `tools`: JSON schemas; `variables`: of the template, in addition to its own. Exceptions of the template propagate.
    """
    values: dict[str, Any] = {"strftime_now": strftime_now, **(variables or {})}
    return str(
        tokenizer.apply_chat_template(
            as_template_reads(messages, tokenizer),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=asks,
            **values,
        )
    )


def check_template(tokenizer: PreTrainedTokenizerBase, system_prompt: str | None = None) -> None:
    """Refuse a tokenizer without a chat template, or one whose template leaves out the system prompt, if given."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer.name_or_path or 'model.path'}: the tokenizer has no chat template: "
            "add chat_template.jinja or `chat_template` in tokenizer_config.json"
        )
    if not system_prompt:
        return
    try:
        shown = MARK in render_template([{"role": "system", "content": MARK}, FIXED[0]], tokenizer)
    except Exception:  # noqa: BLE001  a template is a program; the first row's error tells more
        return
    if not shown:
        raise UserError(
            "data.system_prompt: the chat template leaves out system messages: write the text into the prompts"
        )


def conversation_text(messages: Sequence[Message]) -> str:
    """Return the text that identifies a prompt: that of its only message, or all messages with their roles.

    It includes tool calls, and does not depend on a chat template.
    """
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(_message_text(message) for message in messages)


def _message_text(message: Message) -> str:
    calls = [str(call) for call in message.get("tool_calls") or ()]
    return "\n".join([f"{message['role']}: {message.get('content') or ''}", *calls])


LOGGER = logging.getLogger(__name__)
MARK = "ANSWER7F3A"  # the answer in FIXED: the text after it renders the messages that follow
GIVEN = "GIVEN7F3A"
CALL = {"id": "functions.tool:0", "type": "function", "function": {"name": "tool", "arguments": {KEY: 1}}}
RESULT: Message = {"role": "tool", "tool_call_id": CALL["id"], "name": "tool", "content": GIVEN}
FIXED: tuple[Message, ...] = ({"role": "user", "content": "question"}, {"role": "assistant", "content": MARK})


@dataclass(frozen=True)
class ChatRenderer:
    """Renders messages with the tokenizer's chat template.

    `tools`: their JSON schemas; `variables`: of the template.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._encode(self.render(messages))

    def continuation(
        self, sampled: Sequence[int], messages: Sequence[Message], calls: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the tokens from the end of the answer `sampled` to the start of the next answer.

        They are the rest of the template's text after an answer, `messages`, and the generation prompt. `calls`: those
        of the answer; templates such as GPT-OSS's write the name of the called tool before its result.
        """
        if calls and messages and messages[0]["role"] == "tool" and self._names_results_after_calls:
            answered = (FIXED[0], {"role": "assistant", "content": "", "tool_calls": list(calls)})
            before = self.render(answered, asks=False)
            whole = self.render((*answered, *messages))
            if not whole.startswith(before):
                raise UserError("the chat template changes a call once its result follows: use another template")
            return self._encode(whole.removeprefix(before))
        _, mark, rest = self.render((*FIXED, *messages)).rpartition(MARK)
        if not mark:
            raise UserError("the chat template leaves answers out: no turn can follow one; use another template")
        tokens = self._encode(rest)
        # The text after an answer begins with the stop token, which was sampled already. If messages follow, GPT-OSS's
        # template writes another token in its place.
        ends = {*tokens[:1], *self._last_answer_end}
        return tokens[1:] if sampled and sampled[-1] in ends else tokens

    @cached_property
    def _names_results_after_calls(self) -> bool:
        """Whether the template raises for the result of a tool after an answer without calls."""
        try:
            self.render((*FIXED, RESULT))
        except UserError:
            return True
        return False

    @cached_property
    def _last_answer_end(self) -> tuple[int, ...]:
        """The token, if any, with which the template ends the last answer of a conversation."""
        return self._encode(self.render(FIXED, asks=False).rpartition(MARK)[2])[:1]

    def check(self) -> None:
        """Warn about a template that ignores tools; refuse a template that ignores messages after an answer."""
        ask = FIXED[:1]
        if self.tools and self.render(ask) == replace(self, tools=()).render(ask):  # such as DeepSeek-V3's
            LOGGER.warning("the chat template does not show tools to the policy: prompts must say what it may call")
        given: Message = RESULT if self.tools else {"role": "user", "content": GIVEN}
        tokens = self.continuation((), (given,), (CALL,) if self.tools else ())
        if GIVEN not in self.tokenizer.decode(tokens):
            what = "results of tools" if self.tools else "what follows an answer"
            raise UserError(f"the chat template leaves {what} out (role {given['role']}): use another template")

    def clean(self, text: str) -> str:
        """Remove the tokenizer's added tokens from text that the policy did not write.

        Such text must not begin or end a message. Added tokens that are not marked as special, such as DeepSeek's names
        of roles, are removed, too.
        """
        text = encodable(text)
        left = self._added_tokens.sub("", text)
        while left != text:  # removal may join the texts around a token to another one, which a space replaces
            text = left
            left = self._added_tokens.sub(" ", text)
        return left

    @cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        marks = {token for token in (*added, *self.tokenizer.all_special_tokens) if token.strip()}  # blanks are text
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")

    def render(self, messages: Sequence[Message], asks: bool = True) -> str:
        """Render a conversation; `asks` appends the generation prompt."""
        try:
            return render_template(messages, self.tokenizer, tools=self.tools, asks=asks, variables=self.variables)
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(f"the chat template refuses messages of {roles}: {error}") from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
