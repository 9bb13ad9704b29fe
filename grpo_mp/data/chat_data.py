"""Chat data sets for SFT: every row is checked and measured at the start, and read again when it is trained on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.config.sft_settings import ChatDataConfig, SftConfig
from grpo_mp.data.messages import read_messages
from grpo_mp.data.rows import Row, read_rows, without_nulls
from grpo_mp.data.sets import DataSet, Limit, Measured, Part, column_of, join_parts, read_part
from grpo_mp.data.supervised import Chat, ChatEncoder, LearnedText, LearnedTokens
from grpo_mp.data.template import check_template
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import has_column, parse_json, read_json
from grpo_mp.utils.types import Message, Sample

ChatSet = DataSet[Sample]


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
            sample, size = tokens.sample(0), len(tokens.tokens)
            if self.sft.too_long == "refuse" and size > self.sft.max_tokens:
                raise UserError(
                    f"{row.location}: {size} tokens, sft.max_tokens={self.sft.max_tokens}: raise it, or set "
                    "sft.too_long=drop or truncate"
                )
            learned = len(sample.tokens) - sample.given_tokens if sample else 0
            yield Measured(sample.total_tokens if sample else 0, learned, (text.text, text.spans))

    def read(self, row: Row, index: int) -> Sample:
        """Return the sample of a row that `measure` has kept."""
        (tokens,) = self._encode([self._render(row)])
        sample = tokens.sample(index)
        assert sample is not None, f"{row.location}: the row has changed since the run started"
        return sample

    def read_part(self, path: str) -> Part[Sample]:
        """Read and check the rows of a source."""
        check_template(self.encoder.tokenizer)
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
        messages, first = _messages(row, data.messages_column), 0
    if data.system_prompt and messages[0]["role"] != "system":
        messages, first = [{"role": "system", "content": data.system_prompt}, *messages], first + 1
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
