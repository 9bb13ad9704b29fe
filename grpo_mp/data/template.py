"""Render chat templates, and find out what a template does with the settings."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.data.messages import as_template_reads
from grpo_mp.data.template_date import strftime_now
from grpo_mp.utils.errors import UserError, did_you_mean
from grpo_mp.utils.types import Message

# What transformers gives a template itself, or takes as options of the rendering.
OWN = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"kwargs"}


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


def check_template(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
    """Raise UserError where the tokenizer has no chat template, or the template does not read one of the variables."""
    template = tokenizer.chat_template
    if not template:
        raise UserError(
            f"{tokenizer.name_or_path or 'model.path'}: the tokenizer has no chat template: "
            "add chat_template.jinja or `chat_template` in tokenizer_config.json"
        )
    words = set(re.findall(r"\b[^\W\d]\w*\b", str(template)))
    for name in variables:
        if name in OWN:
            raise UserError(f"data.chat_template_kwargs: {name} is not a variable that can be set: remove it")
        if name not in words:
            raise UserError(
                f"data.chat_template_kwargs: the chat template of {tokenizer.name_or_path or 'model.path'} does not "
                f"read the variable {name}{did_you_mean(name, words)}: correct or remove it"
            )


def drops_system(render: Callable[[list[Message]], str], chat: Sequence[Message]) -> bool:
    """Return whether a template renders the chat alike whatever its system message says."""
    first, *rest = chat
    if first["role"] != "system":
        return False
    return render([{**first, "content": "one"}, *rest]) == render([{**first, "content": "two"}, *rest])


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
