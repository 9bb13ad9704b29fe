"""Fields of a chat message beside role and content: those that keep an answer from being learned, and thinking."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message

THINKING = ("reasoning_content", "reasoning", "thinking")
# Switches of the loss: of OpenAI (weight), ms-swift (loss), slime (loss_mask, step_loss_mask), axolotl (train,
# training, train_on_turn), verl (trainable). True and 1: the answer is learned.
SWITCHES = (
    "weight",
    "loss",
    "loss_mask",
    "loss_weight",
    "step_loss_mask",
    "compute_loss",
    "train",
    "training",
    "trainable",
    "train_on_turn",
    "learn",
)
INVERSE_SWITCHES = ("masked",)  # true and 1: it is not
LIKE_A_SWITCH = re.compile(r"(^|_)(loss|train|learn|mask|weight)", re.IGNORECASE)
# Fields that no template writes and that say nothing which could be learned.
METADATA = frozenset(
    {
        *(
            "id",
            "uid",
            "uuid",
            "tool_call_id",
            "parent_id",
            "message_id",
            "message_tree_id",
            "conversation_id",
            "turn_id",
        ),
        *(
            "user_id",
            "turn_identifier",
            "index",
            "position",
            "hashed_ip",
            "header",
            "metadata",
            "meta",
            "cache_control",
        ),
        *("name", "author", "user", "user_name", "username", "role_name", "model", "model_name", "provider", "source"),
        *(
            "timestamp",
            "time",
            "date",
            "created",
            "created_at",
            "created_date",
            "updated_at",
            "dataset",
            "type",
            "object",
        ),
        *("lang", "language", "country", "state", "status", "finish_reason", "stop_reason", "usage", "synthetic"),
        *(
            "toxic",
            "redacted",
            "detoxify",
            "rank",
            "score",
            "quality",
            "rating",
            "labels",
            "emoji",
            "emojis",
            "deleted",
        ),
        "review_result",
    }
)
READ = frozenset({"role", "content", "tool_calls", *SWITCHES, *INVERSE_SWITCHES})


def is_learned(answer: Message) -> bool:
    """Return whether the fields of an assistant's message let it be learned.

    Raises UserError for a weight between 0 and 1, and for a field that seems to be a switch under an unknown name.
    """
    learned = True
    for name, value in answer.items():
        if name in (*SWITCHES, *INVERSE_SWITCHES):
            if not isinstance(value, int | float) or value not in (0, 1):
                raise UserError(f"{name} of an answer must be true or false, or 1 or 0, not {str(value)[:50]!r}")
            learned = learned and bool(value) == (name in SWITCHES)
        elif name not in READ | METADATA and LIKE_A_SWITCH.search(name):
            raise UserError(
                f"the field {name} of an answer may say that it is not learned, and is not known: name it weight (1 or "
                "0), or remove it"
            )
    return learned


def texts_beside(message: Message) -> Iterator[tuple[str, str]]:
    """Yield field and text of what a message says beside its content and the calls of tools."""
    for name, value in message.items():
        if name not in READ | METADATA:
            yield from ((name, text) for text in _texts(value))


def with_thinking_as_read(message: Message, tokenizer: PreTrainedTokenizerBase) -> Message:
    """Return a message whose thinking is in the field that the tokenizer's chat template writes, if it writes one."""
    given = next((name for name in THINKING if message.get(name)), None)
    if message["role"] != "assistant" or not given:
        return message
    read = thinking_field(tokenizer, str(tokenizer.chat_template))
    if not read or message.get(read):
        return message
    return {name: value for name, value in message.items() if name != given} | {read: message[given]}


@lru_cache(maxsize=16)
def thinking_field(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """Return the field in which the template of the tokenizer looks for the thinking of an answer; None: in no field.

    `template`: that of the tokenizer, which may be given another.
    """
    mark = "THINKING7F3A"
    for name in THINKING:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer", name: mark}]
        try:
            if mark in str(tokenizer.apply_chat_template(messages, tokenize=False)):
                return name
        except Exception:  # noqa: BLE001, S112 - a template is a program
            continue
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
