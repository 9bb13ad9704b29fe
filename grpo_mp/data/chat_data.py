"""Chat data sets for SFT, and the tokens of a chat that have a loss: the assistant's, or all of them (sft.loss_on).

A template with `{% generation %}` marks shows which text is the assistant's. With any other template, a turn is the
text of the whole chat from the turn's generation prompt to the next message; a template that changes earlier text is
refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from grpo_mp.config.sft_settings import ChatDataConfig, SftConfig
from grpo_mp.data.rows import Row, read_rows, without_nulls
from grpo_mp.data.sets import DataSet, Limit, Measured, Part, column_of, join_parts, read_part
from grpo_mp.data.template import (
    ChatRenderer,
    as_template_reads,
    check_template,
    is_learned,
    name_of_call,
    read_messages,
    strftime_now,
    thinking_texts,
)
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import has_column, parse_json, read_json
from grpo_mp.utils.types import Message, Sample

ChatSet = DataSet[Sample]
LossOn = Literal["assistant", "last", "all"]
Span = tuple[int, int]  # characters of a text: start, end (exclusive)
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN = 40  # characters of a text that a message shows


@dataclass(frozen=True)
class Chat:
    """A chat to train on.

    `first`: index of the first message that may have a loss; `tools`: JSON schemas for the template.
    """

    messages: tuple[Message, ...]
    first: int = 0
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class LearnedText:
    """A rendered chat, and the spans of its text that have a loss, in order."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class LearnedTokens:
    """Tokens of a chat, and a mask of the tokens that have a loss."""

    tokens: tuple[int, ...]
    learned: npt.NDArray[np.bool_]

    def cut(self, count: int) -> "LearnedTokens":
        return LearnedTokens(self.tokens[:count], self.learned[:count])

    def sample(self, number: int) -> Sample | None:
        """Return a sample whose response is from the first to the last token with a loss; None without such a token."""
        where = np.flatnonzero(self.learned)
        if not len(where):
            return None
        first = int(where[0])
        end = int(where[-1]) + 1
        mask = self.learned[first:end]
        generated = () if mask.all() else tuple(mask.tolist())
        return Sample.from_tokens(number, self.tokens[:first], self.tokens[first:end], generated)


@dataclass(frozen=True)
class ChatEncoder:
    """Renders and tokenizes chats.

    `stops`: tokens that end an answer; `variables`: of the chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    loss_on: LossOn
    stops: frozenset[int]
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a tokenizer and model without any token that ends an answer."""
        if self._end is None:
            raise UserError(
                "the tokenizer has no eos_token, and the model's generation_config.json no eos_token_id: nothing would "
                "end an answer: set eos_token in tokenizer_config.json"
            )

    @property
    def _end(self) -> int | None:
        eos = self.tokenizer.eos_token_id
        return int(eos) if isinstance(eos, int) else min(self.stops, default=None)

    def render(self, chat: Chat) -> LearnedText:
        """Render a chat; return its text and the spans that have a loss."""
        renderer = ChatRenderer(self.tokenizer, chat.tools, self.variables)
        turns = self._turns(chat)
        if self.loss_on == "all":
            text = renderer.render(chat.messages, asks=False)
            before = renderer.render(chat.messages[: turns[-1]], asks=False)
            last = text[_common_length(text, before) :]  # only the last turn: templates may drop earlier thinking
            _check_whole(last, chat.messages[turns[-1]])
            learned = LearnedText(text, ((0, len(text)),))
        else:
            template = self.tokenizer.get_chat_template(tools=list(chat.tools) or None)
            if MARKS.search(template):
                learned, by_turn = self._marked_turns(renderer, template, chat.messages, turns)
            else:
                learned = _behind_prompts(renderer, chat.messages, turns)
                by_turn = [(span,) for span in learned.spans]
            for turn, spans in zip(turns, by_turn, strict=True):
                _check_whole(" ".join(learned.text[start:end] for start, end in spans), chat.messages[turn])
        return learned

    def _turns(self, chat: Chat) -> list[int]:
        """Return the indices of the messages that have a loss, at least one.

        An answer that begins the chat has no loss, because it follows no prompt.
        """
        first = max(1, chat.first)
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant" and i >= first]
        switched_off = [i for i in turns if not is_learned(chat.messages[i])]
        if self.loss_on == "all" and switched_off:
            raise UserError(
                f"message {switched_off[0] + 1} is not to be learned, and sft.loss_on=all learns every token: set "
                "sft.loss_on=assistant"
            )
        turns = [i for i in (turns[-1:] if self.loss_on == "last" else turns) if i not in switched_off]
        if not turns:
            which = " that may be learned" if switched_off else ""
            raise UserError(f"the chat has no answer of the assistant{which}: nothing would be learned")
        return turns

    def encode(self, texts: Sequence[LearnedText]) -> list[LearnedTokens]:
        """Tokenize rendered chats."""
        if not self.tokenizer.is_fast:
            return [self._ended(*self._by_part(learned)) for learned in texts]
        # The template has written the special tokens; the tokenizer would write a second BOS token.
        encoded = self.tokenizer(
            [learned.text for learned in texts], add_special_tokens=False, return_offsets_mapping=True
        )
        rows = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [self._ended(tokens, _turns_of(learned, offsets)) for learned, tokens, offsets in rows]

    def _marked(self, renderer: ChatRenderer, template: str, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Render a conversation; return its text and the spans that the template marks."""
        (text,), (spans,) = render_jinja_template(
            [as_template_reads(messages, self.tokenizer)],
            tools=list(renderer.tools) or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **({"strftime_now": strftime_now} | self.tokenizer.special_tokens_map | dict(self.variables)),
        )
        return str(text), spans

    def _marked_turns(
        self, renderer: ChatRenderer, template: str, messages: Sequence[Message], turns: Sequence[int]
    ) -> tuple[LearnedText, list[tuple[Span, ...]]]:
        """Return the marked spans of `turns`, in one LearnedText and for each turn, which may have several."""
        text, marked = self._marked(renderer, template, messages)
        spans = tuple(marked)
        # The chat cut after a turn has as many marks as the whole chat up to that turn, whatever their text.
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        ends = [len(self._marked(renderer, template, messages[: turn + 1])[1]) for turn in answers[:-1]]
        by_answer = dict(zip(answers, pairwise((0, *ends, len(spans))), strict=True))
        by_turn = [spans[slice(*by_answer[turn])] for turn in turns]
        return LearnedText(text, tuple(chain.from_iterable(by_turn))), by_turn

    def _by_part(self, learned: LearnedText) -> tuple[list[int], npt.NDArray[np.int64]]:
        """Tokenize each span and the text between spans separately, for a tokenizer without character offsets.

        Returns the tokens, and the number of each token's span, -1 outside of spans.
        """
        parts = list[tuple[int, int, int]]()
        end = 0
        for number, (start, stop) in enumerate(learned.spans):
            parts += [(-1, end, start), (number, start, stop)]
            end = stop
        tokens = list[int]()
        turns = list[int]()
        for turn, start, stop in (*parts, (-1, end, len(learned.text))):
            part = self.tokenizer(learned.text[start:stop], add_special_tokens=False)["input_ids"]
            tokens += part
            turns += [turn] * len(part)
        return tokens, np.array(turns, dtype=np.int64)

    def _ended(self, tokens: Sequence[int], turns: npt.NDArray[np.int64]) -> LearnedTokens:
        """Make each turn end with a stop token that has a loss, unless the turn contains a stop token.

        The stop token is the one that follows the turn; at the end of the chat it is appended.
        """
        tokens = list(tokens)
        learned = turns >= 0
        for turn in np.unique(turns[learned]).tolist() if self.loss_on != "all" else ():
            where = np.flatnonzero(turns == turn)
            if not self.stops.isdisjoint(tokens[i] for i in where):
                continue
            after = int(where[-1]) + 1
            if after < len(turns) and tokens[after] in self.stops:
                learned[after] = True
            elif after == len(turns) == len(tokens):
                assert self._end is not None  # see __post_init__
                tokens.append(self._end)
                learned = np.append(learned, True)
        learned[:1] = False  # no token predicts the first one
        return LearnedTokens(tuple(tokens), learned)


def _behind_prompts(renderer: ChatRenderer, messages: Sequence[Message], turns: Sequence[int]) -> LearnedText:
    """Return the spans of `turns`: from the end of a turn's generation prompt to the next message."""
    text = renderer.render(messages, asks=False)
    spans = []
    for turn in turns:
        prompt = renderer.render(messages[:turn], asks=True)
        upto = renderer.render(messages[: turn + 1], asks=False)
        for part in (prompt, upto):
            if not text.startswith(part):
                raise _changed(turn, text, part, is_last=turn == len(messages) - 1)
        spans.append((len(prompt), len(upto)))
    return LearnedText(text, tuple(spans))


def _changed(turn: int, text: str, part: str, is_last: bool) -> UserError:
    """Return the error for a template that changes earlier text. `is_last`: the turn is the last message."""
    at = _common_length(text, part)
    return UserError(
        f"the chat template cuts or changes what it wrote up to message {turn + 1}: {part[at : at + SHOWN]!r} became "
        f"{text[at : at + SHOWN]!r} in the whole chat: use a template that keeps it, such as one with "
        f"{{% generation %}} marks{'' if is_last else ', or set sft.loss_on=last'}"
    )


def _common_length(one: str, other: str) -> int:
    """Return the length of the texts' common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _check_whole(text: str, answer: Message) -> None:
    """Check that a turn's text has all of the answer's thinking, content and tool calls; blanks do not count."""
    written = _without_blanks(text)
    for name, part in (*thinking_texts(answer), ("content", answer["content"])):
        if part and _without_blanks(part) not in written:
            remedy = "" if name == "content" else f", or remove the field {name}"
            raise UserError(
                f"the chat template cuts the assistant's {name} {part.strip()[:SHOWN]!r}: use a template that writes "
                f"it whole{remedy}"
            )
    for name in map(name_of_call, answer.get("tool_calls") or ()):
        if _without_blanks(name) not in written:
            raise UserError(
                f"the chat template leaves out the assistant's call of {name[:SHOWN]}: use a template with tools"
            )


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _turns_of(learned: LearnedText, offsets: Sequence[Span]) -> npt.NDArray[np.int64]:
    """Return the number of the span to which each token belongs, by its characters; -1 outside of spans."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    turns = np.full(len(starts), -1)
    for number, (start, end) in enumerate(learned.spans):
        turns[(ends > start) & (starts < end) & (ends > starts)] = number
    return turns


@dataclass(frozen=True)
class ChatReader:
    """Converts rows to samples."""

    data: ChatDataConfig  # columns and system prompt
    sft: SftConfig
    encoder: ChatEncoder

    def measure(self, rows: Sequence[Row]) -> Iterator[Measured]:
        """Check rows, and measure their samples."""
        texts = [self._render(row) for row in rows]
        for row, text, tokens in zip(rows, texts, self._encode(texts), strict=True):
            sample = tokens.sample(0)
            size = len(tokens.tokens)
            if self.sft.too_long == "refuse" and size > self.sft.max_tokens:
                raise UserError(
                    f"{row.location}: {size} tokens, sft.max_tokens={self.sft.max_tokens}: raise it, or set "
                    "sft.too_long=drop or truncate"
                )
            learned = len(sample.tokens) - sample.given_tokens if sample else 0
            yield Measured(sample.total_tokens if sample else 0, learned, (text.text, text.spans), text.text)

    def read(self, row: Row, index: int) -> Sample:
        """Return the sample of a row that `measure` has kept."""
        (tokens,) = self._encode([self._render(row)])
        sample = tokens.sample(index)
        assert sample is not None, f"{row.location}: the row has changed since the run started"
        return sample

    def read_part(self, path: str) -> Part[Sample]:
        """Read and check the rows of a source."""
        check_template(self.encoder.tokenizer, self.data.system_prompt)
        limit = Limit("sft.max_tokens", self.sft.max_tokens, "chats")
        return read_part(read_rows(path, self.data.source), self.measure, self.read, limit)

    def _render(self, row: Row) -> LearnedText:
        chat = read_chat(row, self.data)
        try:
            return self.encoder.render(chat)
        except UserError as error:
            raise UserError(f"{row.location}: {error}") from error
        except Exception as error:  # a template is a program
            raise UserError(
                f"{row.location}: the tokenizer's chat template refuses the chat: {one_line(error) or repr(error)}"
            ) from error

    def _encode(self, texts: Sequence[LearnedText]) -> list[LearnedTokens]:
        limit = self.sft.max_tokens if self.sft.too_long == "truncate" else None
        return [one.cut(limit) if limit else one for one in self.encoder.encode(texts)]


def load_train_chats(reader: ChatReader) -> ChatSet:
    """Read, check and measure the data sets of `data.train`."""
    sets = reader.data.train
    parts = {name: reader.read_part(own.path) for name, own in sets.items()}
    return join_parts(parts, "data.train", "left out", [own.weight for own in sets.values()])


def load_held_out_chats(reader: ChatReader) -> dict[str, ChatSet]:
    """Read, check and measure the data sets of `data.eval`."""
    sets = {}
    for name, own in reader.data.eval.items():
        sets[name] = join_parts({name: reader.read_part(own.path)}, "data.eval", "no part of its loss")
    return sets


def stop_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens at which engines end an answer: eos of generation_config.json and of the tokenizer."""
    file = model / "generation_config.json"
    config = read_json(file) if file.is_file() else {}
    eos = config.get("eos_token_id") if isinstance(config, dict) else None
    listed = eos if isinstance(eos, list) else [eos]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if isinstance(token, int))


def read_chat(row: Row, data: ChatDataConfig) -> Chat:
    """Return the chat of a row, from the column of messages, or from those of prompt and completion."""
    tools = _read_tools(row)
    pair = (data.prompt_column, data.completion_column)
    if not has_column(row.columns, data.messages_column) and all(has_column(row.columns, name) for name in pair):
        prompt = _messages(row, data.prompt_column, "user")
        messages = [*prompt, *_messages(row, data.completion_column, "assistant")]
        first = len(prompt)
        if not prompt[-1]["content"].strip():
            raise UserError(f"{row.location}: column {data.prompt_column}: the prompt is empty")
    else:
        messages = _messages(row, data.messages_column)
        first = 0
    if data.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
        first = first + 1
    return Chat(tuple(messages), first, tools)


def _messages(row: Row, column: str, role: str = "") -> list[Message]:
    location = f"{row.location}: column {column}"
    remedy = "set data.messages_column, or data.prompt_column and data.completion_column, to its columns"
    messages = read_messages(column_of(row, column, remedy), location, role)
    for message in messages:
        if message["role"] == "assistant" and not (message["content"].strip() or message.get("tool_calls")):
            raise UserError(f"{location}: an answer of the assistant is empty")
    return messages


def _read_tools(row: Row) -> tuple[dict[str, Any], ...]:
    value = row.columns.get("tools")
    if isinstance(value, str):
        value = parse_json(value, f"{row.location}, column tools")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise UserError(f"{row.location}: column tools: expected a list of JSON schemas, or its JSON")
    return tuple(without_nulls(tool) for tool in value)
