"""Chat data sets for SFT: every row is checked and measured at the start, and read again when it is trained on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from transformers import PreTrainedTokenizerBase

from grpo_mp.config.sft_settings import ChatDataConfig, SftConfig
from grpo_mp.data.cursor import Mixture, mix_sets
from grpo_mp.data.messages import read_messages
from grpo_mp.data.rows import Row, Rows, read_rows, without_nulls
from grpo_mp.data.set_checks import joined_digest, left_out
from grpo_mp.data.supervised import Chat, ChatEncoder, LearnedText, LearnedTokens
from grpo_mp.data.template import check_template
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import did_you_mean_column, has_column, parse_json, read_column, read_json, shorten
from grpo_mp.utils.types import Message, Sample

ROWS_AT_ONCE = 1024  # rows in one call of the tokenizer


@dataclass(frozen=True)
class ChatReader:
    """Converts rows to samples."""

    data: ChatDataConfig  # columns and system prompt
    sft: SftConfig
    encoder: ChatEncoder

    def render(self, row: Row) -> LearnedText:
        """Render the chat of a row with the chat template."""
        chat = read_chat(row, self.data)
        try:
            return self.encoder.render(chat)
        except UserError as error:
            raise UserError(f"{row.location}: {error}") from error
        except Exception as error:  # a template is a program
            raise UserError(
                f"{row.location}: the tokenizer's chat template refuses the chat: {one_line(error) or repr(error)}"
            ) from error

    def encode(self, rows: Sequence[Row]) -> list[LearnedTokens]:
        """Tokenize rows, and cut them to sft.max_tokens if sft.too_long is truncate."""
        limit = self.sft.max_tokens if self.sft.too_long == "truncate" else None
        encoded = self.encoder.encode([self.render(row) for row in rows])
        return [one.cut(limit) if limit else one for one in encoded]

    def sample(self, row: Row, number: int) -> Sample | None:
        return self.encode([row])[0].sample(number)


@dataclass(frozen=True, eq=False)
class ChatRows:
    """Samples of one file or source. Rows are read on access; memory holds only their numbers and sizes."""

    rows: Rows
    reader: ChatReader
    numbers: npt.NDArray[np.int64]  # row of each sample
    lengths: npt.NDArray[np.int64]  # tokens of each sample
    learned: npt.NDArray[np.int64]  # tokens of each sample that have a loss
    digest: str  # of the content of the rows
    too_long: int  # number of rows that were left out

    def warnings(self, setting: str, outcome: str) -> Iterator[str]:
        """Yield a warning if rows were left out. `outcome`: consequence for these rows."""
        limit, rows = self.reader.sft.max_tokens, self.too_long + len(self.numbers)
        yield from left_out(
            setting, self.too_long, rows=rows, unit="chats", limit=f"sft.max_tokens={limit}", outcome=outcome
        )

    def read(self, place: int, number: int) -> Sample:
        """Read the sample at `place`, with `number` as its group id; refuse a row that has changed since the start."""
        row = self.rows[int(self.numbers[place])]
        sample = self.reader.sample(row, number)
        if sample is None or _sizes(sample) != (self.lengths[place], self.learned[place]):
            raise UserError(
                f"{row.location}: the row has changed since the run started: leave data alone while it runs"
            )
        return sample


@dataclass(frozen=True, eq=False)
class ChatSet:
    """Samples of several sources, one after the other. `too_long`: number of rows that were left out."""

    source: str
    parts: tuple[ChatRows, ...]
    too_long: int
    mixture: Mixture = ()
    digest: str = ""  # of the content of its rows; "" for an eval set
    warnings: tuple[str, ...] = ()  # shown at every start

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, up to the last token with a loss."""
        return np.concatenate([part.lengths for part in self.parts])

    @cached_property
    def learned(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample that have a loss."""
        return np.concatenate([part.learned for part in self.parts])

    @property
    def epoch_size(self) -> int:
        return sum(share.count for share in self.mixture) or len(self)

    def __len__(self) -> int:
        return sum(len(part.numbers) for part in self.parts)

    def __getitem__(self, index: int) -> Sample:
        part, place = self._find(index)
        return part.read(place, index)

    def location(self, index: int) -> str:
        part, place = self._find(index)
        return f"{part.rows.name}, {part.rows.unit} {int(part.numbers[place]) + 1}"

    def _find(self, index: int) -> tuple[ChatRows, int]:
        place = index
        for part in self.parts:
            if place < len(part.numbers):
                return part, place
            place -= len(part.numbers)
        raise IndexError(index)


def load_train_chats(data: ChatDataConfig, sft: SftConfig, encoder: ChatEncoder) -> ChatSet:
    """Read, check and measure the data sets of `data.train`."""
    parts = list[ChatRows]()
    too_long = 0
    warnings = list[str]()
    for name, train_set in data.train.items():
        own = train_set.model_dump(include={"source", "system_prompt"}, exclude_none=True)
        part = check_chats(train_set.path, ChatReader(data.model_copy(update=own), sft, encoder))
        too_long += part.too_long
        warnings += part.warnings("data.train" if name == "train" else f"data.train.{name}", "left out")
        parts.append(part)
    sizes, weights = [len(part.numbers) for part in parts], [one.weight for one in data.train.values()]
    mixture = mix_sets(sizes, weights) if len(sizes) > 1 else ()
    return ChatSet(
        ", ".join(part.rows.name for part in parts),
        tuple(parts),
        too_long=too_long,
        mixture=mixture,
        digest=joined_digest(part.digest for part in parts),
        warnings=tuple(warnings),
    )


def load_held_out_chats(data: ChatDataConfig, sft: SftConfig, encoder: ChatEncoder) -> dict[str, ChatSet]:
    """Read, check and measure the data sets of `data.eval`."""
    sets = {}
    for name, held_out in data.eval.items():
        own = data.model_copy(update=held_out.model_dump(include={"source", "system_prompt"}, exclude_none=True))
        part = check_chats(held_out.path, ChatReader(own, sft, encoder), held_out.max_samples)
        warnings = part.warnings(f"data.eval.{name}", "no part of its loss")
        sets[name] = ChatSet(held_out.path, (part,), part.too_long, warnings=tuple(warnings))
    return sets


def check_chats(source: str, reader: ChatReader, count: int | None = None) -> ChatRows:
    """Read all rows of `source`, or the first `count`, and measure the samples that fit sft.max_tokens.

    Refuses a tokenizer without a chat template, a malformed row, a row whose answer the template cuts, a row that is
    too long under sft.too_long=refuse, and a source of which no row is left.
    """
    check_template(reader.encoder.tokenizer)
    rows = read_rows(source, reader.data.source)
    if not len(rows):
        raise UserError(f"{source}: no rows: give a file with at least one chat")
    numbers = list[int]()
    lengths = list[int]()
    learned = list[int]()
    sft = reader.sft
    end = min(len(rows), count or len(rows))
    content = xxhash.xxh3_128()
    for start in range(0, end, ROWS_AT_ONCE):
        chunk = [rows[number] for number in range(start, min(start + ROWS_AT_ONCE, end))]
        for number, (row, tokens) in enumerate(zip(chunk, reader.encode(chunk), strict=True), start):
            sample = tokens.sample(number)
            size_and_tokens = np.array([len(tokens.tokens), *tokens.tokens], dtype="<i8")
            content.update(size_and_tokens.tobytes() + tokens.learned.tobytes())
            if sample is None or sample.total_tokens > sft.max_tokens:
                if sft.too_long == "refuse":
                    raise UserError(
                        f"{row.location}: {len(tokens.tokens)} tokens, sft.max_tokens={sft.max_tokens}: raise it, or "
                        "set sft.too_long=drop or truncate"
                    )
                continue
            numbers.append(number)
            length, count_learned = _sizes(sample)
            lengths.append(length)
            learned.append(count_learned)
    if not numbers:
        raise UserError(f"{source}: all {end} chats are longer than sft.max_tokens={sft.max_tokens}: raise it")
    kept, sizes, losses = (np.array(values, dtype=np.int64) for values in (numbers, lengths, learned))
    return ChatRows(
        rows,
        reader,
        numbers=kept,
        lengths=sizes,
        learned=losses,
        digest=joined_digest((content.digest(), kept.tobytes())),
        too_long=end - len(kept),
    )


def _sizes(sample: Sample) -> tuple[int, int]:
    return sample.total_tokens, len(sample.tokens) - sample.given_tokens


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
    if has_column(row.columns, data.messages_column):
        messages, first = _messages(row, data.messages_column), 0
    elif has_column(row.columns, data.prompt_column) and has_column(row.columns, data.completion_column):
        prompt = _messages(row, data.prompt_column, "user")
        messages = [*prompt, *_messages(row, data.completion_column, "assistant")]
        first = len(prompt)
        if not prompt[-1]["content"].strip():
            raise UserError(f"{row.location}: column {data.prompt_column}: the prompt is empty")
    else:
        known = shorten(", ".join(map(str, row.columns)), 300) or "none"
        hint = did_you_mean_column(data.messages_column, row.columns)
        raise UserError(
            f"{row.location}: no column {data.messages_column}{hint}, and not both {data.prompt_column} and "
            f"{data.completion_column}; the row has: {known}: set data.messages_column, or data.prompt_column and "
            "data.completion_column, to its columns"
        )
    if data.system_prompt and messages[0]["role"] != "system":
        messages, first = [{"role": "system", "content": data.system_prompt}, *messages], first + 1
    return Chat(tuple(messages), first, tools)


def _messages(row: Row, column: str, role: str = "") -> list[Message]:
    location = f"{row.location}: column {column}"
    messages = read_messages(read_column(row.columns, column), location, role)
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
