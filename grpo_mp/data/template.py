"""Chat templates: render conversations, tokenize later turns, and check the template."""

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

_today = [date.today()]  # one item, which set_template_date replaces


def template_date() -> date:
    """Return the date that chat templates write: by default, the date on which this process started."""
    return _today[0]


def set_template_date(day: date) -> None:
    """Set the date that chat templates write."""
    _today[0] = day


def strftime_now(pattern: str) -> str:
    """Format the date of the run; chat templates call this function by name for the current time."""
    return datetime.combine(template_date(), time()).strftime(pattern)


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


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer.name_or_path or 'model.path'}: the tokenizer has no chat template: "
            "add chat_template.jinja or `chat_template` in tokenizer_config.json"
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

    def continuation(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens from the end of the answer `sampled` to the start of the next answer.

        They are the rest of the template's text after an answer, `messages`, and the generation prompt.
        """
        _, mark, rest = self.render((*FIXED, *messages)).rpartition(MARK)
        if not mark:
            raise UserError("the chat template leaves answers out: no turn can follow one; use another template")
        tokens = self._encode(rest)
        # The template, too, begins the text after an answer with the stop token that was sampled.
        return tokens[1:] if sampled and tokens[:1] == tuple(sampled[-1:]) else tokens

    def check(self) -> None:
        """Warn about a template that ignores tools; refuse a template that ignores messages after an answer."""
        ask = FIXED[:1]
        if self.tools and self.render(ask) == replace(self, tools=()).render(ask):  # such as DeepSeek-V3's
            LOGGER.warning("the chat template does not show tools to the policy: prompts must say what it may call")
        given: Message = {"role": "user", "content": GIVEN}
        if self.tools:
            given = {"role": "tool", "tool_call_id": "functions.tool:0", "name": "tool", "content": GIVEN}
        self.continuation((), (given,))
        if GIVEN not in self.render((*FIXED, given)).rpartition(MARK)[2]:
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
            left, text = self._added_tokens.sub(" ", left), left
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
