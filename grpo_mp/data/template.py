"""Render chat templates."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.data.messages import as_template_reads
from grpo_mp.data.template_date import strftime_now
from grpo_mp.types import Message


def render_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] = (),
    asks: bool = True,
) -> str:
    """Return a conversation as the tokenizer's chat template writes it, with `asks` up to where the policy answers.

    `tools`: JSON schemas. Raises what the template raises.
    """
    return str(
        tokenizer.apply_chat_template(
            as_template_reads(messages, tokenizer),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=asks,
            strftime_now=strftime_now,
        )
    )
