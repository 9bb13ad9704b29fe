"""Chats whose loss and gradient are compared with TRL's: several turns, of very different lengths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from grpo_mp.config.sft_settings import ChatDataConfig, SftConfig
from grpo_mp.data.chat_data import ChatEncoder, ChatReader, ChatSet, load_train_chats, stop_tokens
from tools.tiny.models import CHAT_TEMPLATE

# The same template, which also says what is the assistant's.
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURNS = [
    [
        _message("system", "Add."),
        *(
            _message(role, text * (1 + number))
            for role, text in (("user", "1+2? "), ("assistant", "3. "), ("user", "And 4?"), ("assistant", "7! "))
        ),
    ]
    for number in range(5)
]
# Rows and template by kind; TRL learns the same of them by the setting of this name.
CHATS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "assistant_only_loss": ([{"messages": chat} for chat in TURNS], MARKED),
    "completion_only_loss": ([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in TURNS], CHAT_TEMPLATE),
}


def read(name: str) -> Sequence[dict[str, Any]]:
    """A source of rows."""
    return CHATS[name][0]


def chat_set(model: Path, kind: str) -> ChatSet:
    """The samples of one kind of chats."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATS[kind][1]
    encoder = ChatEncoder(tokenizer, "assistant", stop_tokens(model, tokenizer))
    data = ChatDataConfig(train=kind, source="tests.parallel.chats:read")
    return load_train_chats(ChatReader(data, SftConfig(batch_size=1, max_tokens=512), encoder))
