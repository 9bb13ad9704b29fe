"""Chat templates: rendering, the tokens of later messages, and what a template does with the settings."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_mp.data.messages import as_template_reads
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import encodable
from grpo_mp.utils.types import Message

_today = [date.today()]  # of this process's run


def template_date() -> date:
    """Return the date that templates write: that of the process's start, or what `set_template_date` was given."""
    return _today[0]


def set_template_date(day: date) -> None:
    """Set the date that chat templates write."""
    _today[0] = day


def strftime_now(pattern: str) -> str:
    """Format the date of the run; templates call it by this name for the present time."""
    return datetime.combine(template_date(), time()).strftime(pattern)


def render_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] = (),
    asks: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation as the tokenizer's chat template writes it, with `asks` up to where the policy answers.

    `tools`: JSON schemas; `variables`: of the template, in addition to its own. Raises what the template raises.
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


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer.name_or_path or 'model.path'}: the tokenizer has no chat template: "
            "add chat_template.jinja or `chat_template` in tokenizer_config.json"
        )


def conversation_text(messages: Sequence[Message]) -> str:
    """Return a prompt as one text, by which it is known and shown: that of its only message, or all with their roles.

    Calls of tools are part of it. The text does not depend on a template.
    """
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(_message_text(message) for message in messages)


def _message_text(message: Message) -> str:
    calls = [str(call) for call in message.get("tool_calls") or ()]
    return "\n".join([f"{message['role']}: {message.get('content') or ''}", *calls])


LOGGER = logging.getLogger(__name__)
MARK = "ANSWER7F3A"  # the answer of the fixed conversation: what follows it is the rendering of what is new
GIVEN = "GIVEN7F3A"
FIXED: tuple[Message, ...] = ({"role": "user", "content": "question"}, {"role": "assistant", "content": MARK})


@dataclass(frozen=True)
class ChatRenderer:
    """Renders messages by the tokenizer's chat template. `tools`: their JSON schemas; `variables`: of the template."""

    tokenizer: PreTrainedTokenizerBase
    tools: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._encode(self._render(messages))

    def continuation(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens between an answer that ends with `sampled` and the next: its end if cut, and `messages`."""
        _, mark, rest = self._render((*FIXED, *messages)).rpartition(MARK)
        if not mark:
            raise UserError("the chat template leaves answers out: no turn can follow one; use another template")
        tokens = self._encode(rest)
        # The sampled stop token is the first of what the template writes after an answer.
        return tokens[1:] if sampled and tokens[:1] == tuple(sampled[-1:]) else tokens

    def check(self) -> None:
        """Warn where the template leaves out tools."""
        ask = FIXED[:1]
        if self.tools and self._render(ask) == replace(self, tools=())._render(ask):  # DeepSeek-V3's is such a one
            LOGGER.warning("the chat template does not show tools to the policy: prompts must say what it may call")
        given: Message = {"role": "user", "content": GIVEN}
        if self.tools:
            given = {"role": "tool", "tool_call_id": "functions.tool:0", "name": "tool", "content": GIVEN}
        self.continuation((), (given,))
        if GIVEN not in self._render((*FIXED, given)).rpartition(MARK)[2]:
            what = "results of tools" if self.tools else "what follows an answer"
            raise UserError(f"the chat template leaves {what} out (role {given['role']}): use another template")

    def clean(self, text: str) -> str:
        """Remove the tokenizer's added tokens from a text that is not the policy's: it must not begin or end a message.

        Those that are not marked as special are among them, such as DeepSeek's names of roles.
        """
        text = encodable(text)
        left = self._added_tokens.sub("", text)
        while left != text:  # what was around one may be another: a space between them keeps it from being a third
            left, text = self._added_tokens.sub(" ", left), left
        return left

    @cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        marks = {token for token in (*added, *self.tokenizer.all_special_tokens) if token.strip()}  # spaces are text
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")

    def _render(self, messages: Sequence[Message]) -> str:
        return self.render(messages, asks=True)

    def render(self, messages: Sequence[Message], asks: bool) -> str:
        """Return the text of a conversation, with `asks` up to where the policy answers."""
        try:
            return render_template(messages, self.tokenizer, tools=self.tools, asks=asks, variables=self.variables)
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(f"the chat template refuses messages of {roles}: {error}") from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
