"""Answers in OpenAI's harmony format, which GPT-OSS writes: messages with a channel, and with a recipient if they call.

The format: https://cookbook.openai.com/articles/openai-harmony. A recipient may stand before the channel or after it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mp.utils.types import Message

CHANNEL = "<|channel|>"
PARSER = "gpt-oss"  # of SGLang
START = "<|start|>assistant"  # the end of a prompt
MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)+)<\|message\|>"
    r"(?P<text>.*?)(?P<end><\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
THOUGHTS = "analysis"
FIELD = "thinking"  # of a message, in GPT-OSS's chat template
TAGGED = re.compile(r"<think>\n(.*)\n</think>\n(.*)", re.DOTALL)  # as `split_thoughts` writes them


@dataclass(frozen=True)
class Said:
    """One message of an answer. `recipient`: the tool that it calls, or ""; `end`: its last token, "" if it was cut."""

    channel: str
    recipient: str
    text: str
    end: str

    @property
    def is_thought(self) -> bool:
        return self.channel == THOUGHTS and not self.recipient

    def as_parsed(self) -> str:
        """Return the message in the spelling of a call that SGLang's parser reads."""
        if not self.recipient:
            return f"{START}{CHANNEL}{self.channel}<|message|>{self.text}{self.end}"
        return f"{START}{CHANNEL}commentary to={self.recipient} <|constrain|>json<|message|>{self.text}{self.end}"


def split_thoughts(answer: str) -> tuple[str, str]:
    """Return the thoughts of an answer, between the tags that other models write, and its other messages.

    `answer`: with its special tokens, from the end of the prompt on.
    """
    said = [*_messages(answer)]
    thoughts = "\n".join(message.text.strip() for message in said if message.is_thought)
    others = "".join(message.as_parsed() for message in said if not message.is_thought)
    return (f"<think>\n{thoughts}\n</think>\n" if thoughts else ""), others


def plain_text(answer: str) -> str:
    """Return an answer as other models write it: its thoughts between tags, then what it says.

    The tag of thoughts that were cut stays open. Text outside of messages is kept.
    """
    said = [*_messages(answer)]
    thoughts, _ = split_thoughts(answer)
    if said and said[-1].is_thought and not said[-1].end:
        thoughts = thoughts.removesuffix("\n</think>\n")
    spoken = [f"{message.recipient} {message.text}".strip() for message in said if not message.is_thought]
    outside = re.sub(r"<\|\w+\|>", "", MESSAGE.sub("", answer)).removeprefix("assistant")
    return thoughts + "\n".join(text for text in (outside.strip(), *spoken) if text)


def with_thinking(message: Message) -> Message:
    """Move thoughts from the content of a message to its field `thinking`.

    The chat template refuses a call with both: there the thoughts stay, of which it writes those of the last turns.
    """
    found = TAGGED.fullmatch(str(message.get("content") or ""))
    if not found:
        return message
    thoughts, content = found.groups()
    return {**message, FIELD: thoughts, "content": "" if message.get("tool_calls") else content}


def _messages(answer: str) -> Iterator[Said]:
    for match in MESSAGE.finditer(answer):
        header = match["header"]
        recipient = re.search(r"to=([^\s<]+)", header)
        channel = re.match(r"\w*", header.partition(CHANNEL)[2].lstrip())
        yield Said(
            channel[0] if channel else "", recipient[1] if recipient else "", text=match["text"], end=match["end"]
        )
