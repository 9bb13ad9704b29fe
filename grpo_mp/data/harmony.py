"""Parser of OpenAI's harmony format, in which GPT-OSS answers.

An answer is a sequence of messages, each in a channel: `analysis` is the reasoning. A tool call also has a recipient,
before or after the channel. Source: https://cookbook.openai.com/articles/openai-harmony.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mp.utils.types import Message

CHANNEL = "<|channel|>"
PARSER = "gpt-oss"  # name of SGLang's tool parser
START = "<|start|>assistant"  # last text of a prompt
MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)+)<\|message\|>"
    r"(?P<text>.*?)(?P<end><\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
ANALYSIS = "analysis"
FIELD = "thinking"  # field of a message that GPT-OSS's chat template renders
TAGGED = re.compile(r"<think>\n(.*)\n</think>\n(.*)", re.DOTALL)  # output of `split_analysis`


@dataclass(frozen=True)
class HarmonyMessage:
    """A message of an answer. `recipient`: the called tool, or ""; `end`: end token, "" if the answer was cut."""

    channel: str
    recipient: str
    text: str
    end: str

    @property
    def is_analysis(self) -> bool:
        return self.channel == ANALYSIS and not self.recipient

    def as_parsed(self) -> str:
        """Return the text of the message in the one form of calls that SGLang's parser reads."""
        if not self.recipient:
            return f"{START}{CHANNEL}{self.channel}<|message|>{self.text}{self.end}"
        return f"{START}{CHANNEL}commentary to={self.recipient} <|constrain|>json<|message|>{self.text}{self.end}"


def split_analysis(answer: str) -> tuple[str, str]:
    """Split an answer into its analysis between `<think>` tags, and its other messages for SGLang's parser.

    `answer`: the sampled text with special tokens.
    """
    messages = [*_messages(answer)]
    analysis = "\n".join(message.text.strip() for message in messages if message.is_analysis)
    others = "".join(message.as_parsed() for message in messages if not message.is_analysis)
    return (f"<think>\n{analysis}\n</think>\n" if analysis else ""), others


def plain_text(answer: str) -> str:
    """Convert an answer to the format of other reasoning models: `<think>` analysis `</think>`, then the other text.

    The closing tag is left out if the analysis was cut. Text outside messages is not dropped.
    """
    messages = [*_messages(answer)]
    analysis, _ = split_analysis(answer)
    if messages and messages[-1].is_analysis and not messages[-1].end:
        analysis = analysis.removesuffix("\n</think>\n")
    texts = [f"{message.recipient} {message.text}".strip() for message in messages if not message.is_analysis]
    outside = re.sub(r"<\|\w+\|>", "", MESSAGE.sub("", answer)).removeprefix("assistant")
    return analysis + "\n".join(text for text in (outside.strip(), *texts) if text)


def move_analysis(message: Message) -> Message:
    """Move the analysis between `<think>` tags from the content of a message to its field `thinking`.

    A message with tool calls gets an empty content, because GPT-OSS's chat template raises if it has both fields.
    """
    found = TAGGED.fullmatch(str(message.get("content") or ""))
    if not found:
        return message
    analysis, content = found.groups()
    return {**message, FIELD: analysis, "content": "" if message.get("tool_calls") else content}


def _messages(answer: str) -> Iterator[HarmonyMessage]:
    for match in MESSAGE.finditer(answer):
        header = match["header"]
        recipient = re.search(r"to=([^\s<]+)", header)
        channel = re.match(r"\w*", header.partition(CHANNEL)[2].lstrip())
        yield HarmonyMessage(
            channel[0] if channel else "", recipient[1] if recipient else "", text=match["text"], end=match["end"]
        )
