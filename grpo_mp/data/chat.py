"""Chat messages as tokens: a prompt in full, later messages by themselves, behind tokens that were sampled.

Rendering a conversation again would change what was sampled: templates strip thinking, and text does not encode to the
ids it came from. So only what is new is rendered, after a fixed conversation (as in TRL, verl and SkyRL), and sampled
ids stay in their place.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_mp.data.template import render_template
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import encodable
from grpo_mp.utils.types import Message

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
        """Render a conversation up to where the policy answers."""
        return self._encode(self._render(messages))

    def continuation(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens between an answer that ends with `sampled` and the next: its end if cut, and `messages`.

        Raises UserError where the template does not show the answer of the fixed conversation.
        """
        _, mark, rest = self._render((*FIXED, *messages)).rpartition(MARK)
        if not mark:
            raise UserError("the chat template leaves answers out: no turn can follow one; use another template")
        tokens = self._encode(rest)
        # The sampled stop token is the first of what the template writes after an answer.
        return tokens[1:] if sampled and tokens[:1] == tuple(sampled[-1:]) else tokens

    def check(self) -> None:
        """Warn where the template leaves out tools. Raises UserError for results of tools, or later questions."""
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
        """Take the tokenizer's added tokens out of a text that is not the policy's: it must not begin or end a message.

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
        """Return the text of a conversation, with `asks` up to where the policy answers.

        Raises UserError where the template does.
        """
        try:
            return render_template(messages, self.tokenizer, self.tools, asks, self.variables)
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(f"the chat template refuses messages of {roles}: {error}") from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
