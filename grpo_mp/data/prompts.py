"""Prompt sets: rows are read by the column mapping, rendered by the chat template and tokenized as they are needed."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import chain
from numbers import Rational, Real
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.cursor import Mixture, mix_sets
from grpo_mp.data.digest import RowsDigest, joined_digest
from grpo_mp.data.messages import read_message
from grpo_mp.data.pass_rates import within_pass_rates
from grpo_mp.data.rows import Row, Rows, read_rows
from grpo_mp.data.template import render_template
from grpo_mp.errors import UserError, one_line
from grpo_mp.reading import did_you_mean_column, has_column, read_column, shorten
from grpo_mp.rewards.settings import DATA_SET
from grpo_mp.types import Prompt
from grpo_mp.user_code import time_limit

ROWS_AT_ONCE = 1024  # that the tokenizer is given
TEMPLATE_LIMIT_S = 20.0  # of one prompt
Messages = list[dict[str, Any]]
ToolsOf = Callable[[Row], Sequence[dict[str, Any]]]  # JSON schemas for the template, of the tools of a row
CheckColumns = Callable[[Mapping[str, Any], str], None]  # raises UserError for the columns of the row at a location


def no_tools(row: Row) -> Sequence[dict[str, Any]]:
    """Return the schemas of a row without tools."""
    return ()


def no_check(columns: Mapping[str, Any], location: str) -> None:
    """Accept the columns of any row."""


@dataclass(frozen=True)
class PromptReader:
    """How a row becomes a prompt."""

    data: DataConfig  # columns and system prompt
    tokenizer: PreTrainedTokenizerBase
    tools: ToolsOf = no_tools
    columns: Mapping[str, Any] = field(default_factory=dict)  # added to those of the row
    check_columns: CheckColumns = no_check  # what rewards need of them

    def check(self, row: Row) -> str:
        """Return what the template makes of a row. Raises UserError for a malformed one (file and line)."""
        _read_answer(row, self.data)
        return _apply_chat_template(_read_messages(row, self.data), row, self.tokenizer, self.tools(row))

    def check_template(self, row: Row) -> None:
        """Raise UserError where the template takes too long, or makes the same of any prompt."""
        chat = _read_messages(row, self.data)
        chats = ([*chat[:-1], chat[-1] | {"content": content}] for content in ("one", "two"))
        label = f"{self.tokenizer.name_or_path or 'model.path'}: the chat template"
        with time_limit(TEMPLATE_LIMIT_S, label):
            texts = {_apply_chat_template(chat, row, self.tokenizer, self.tools(row)) for chat in chats}
        if len(texts) == 1:
            raise UserError(f"{label} leaves the prompt out: use the one of this model")

    def text(self, row: Row) -> str:
        """Return a row's prompt as the user wrote it."""
        return _read_messages(row, self.data)[-1]["content"]

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of what the template made."""
        # The template has written the special tokens already; adding them here would begin prompts with two.
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def read(self, row: Row, index: int) -> Prompt:
        """Return the prompt of a row."""
        chat, (tokens,) = _read_messages(row, self.data), self.tokenize([self.check(row)])
        answer, columns = _read_answer(row, self.data), {**row.columns, **self.columns}
        return Prompt(index, chat[-1]["content"], tuple(tokens), answer, columns, tuple(chat))


@dataclass(frozen=True, eq=False)
class RowPrompts:
    """Prompts of one file or source, read when they are asked for: memory holds the number of each one's row."""

    rows: Rows
    numbers: npt.NDArray[np.int64]
    reader: PromptReader
    content: RowsDigest  # of all rows

    def texts(self) -> Iterator[str]:
        """Yield the prompts as the user wrote them."""
        return (self.reader.text(self.rows[int(number)]) for number in self.numbers)


@dataclass(frozen=True, eq=False)
class StoredPrompts(Sequence[Prompt]):
    """The prompts of several sources, one after the other."""

    parts: tuple[RowPrompts, ...]

    def __len__(self) -> int:
        return sum(len(part.numbers) for part in self.parts)

    def __getitem__(self, index: Any) -> Any:
        """Return one prompt, or a list of those of a slice. Raises UserError where the data changed since the start."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = index
        for part in self.parts:
            if place < len(part.numbers):
                return part.reader.read(part.rows[int(part.numbers[place])], index)
            place -= len(part.numbers)
        raise IndexError(index)

    def texts(self) -> Iterator[str]:
        """Yield the prompts as the user wrote them."""
        return chain.from_iterable(part.texts() for part in self.parts)


@dataclass(frozen=True)
class PromptSet:
    """Prompts that fit the limit, in the order of their rows; `prompts[i].index == i`."""

    source: str
    prompts: Sequence[Prompt]
    num_too_long: int  # rows whose prompt has more tokens than the limit
    mixture: Mixture = ()  # how sets are mixed
    num_filtered: int = 0  # prompts that are left out for their pass rate
    digest: str = ""  # of what its rows say; "" where none were read

    @property
    def epoch_size(self) -> int:
        """Return the prompts of an epoch."""
        return sum(share.count for share in self.mixture) or len(self)

    def texts(self) -> Iterator[str]:
        """Yield the prompts as the user wrote them, without tokens."""
        prompts = self.prompts
        return prompts.texts() if isinstance(prompts, StoredPrompts) else (prompt.text for prompt in prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)


def load_train_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    tools: ToolsOf = no_tools,
    check_columns: CheckColumns = no_check,
) -> PromptSet:
    """Check the sets of `data.train`; rewards see the set's name as column `data_set`. Raises UserError."""
    parts, num_too_long, num_filtered = list[RowPrompts](), 0, 0
    for name, train_set in data.train.items():
        own = train_set.model_dump(include={"source", "prompt_column", "answer_column", "system_prompt"})
        columns = data.model_copy(update={key: value for key, value in own.items() if value is not None})
        is_named = len(data.train) > 1 or train_set.reward is not None
        reader = PromptReader(columns, tokenizer, tools, {DATA_SET: name} if is_named else {}, check_columns)
        part = check_rows(train_set.path, reader, max_prompt_tokens)
        kept = part.numbers
        if file := train_set.pass_rates:
            kept = kept[within_pass_rates(part.texts(), file, train_set)]
        num_too_long += len(part.rows) - len(part.numbers)
        num_filtered += len(part.numbers) - len(kept)
        parts.append(replace(part, numbers=kept))
    sizes = [len(part.numbers) for part in parts]
    weights = [train_set.weight for train_set in data.train.values()]
    return PromptSet(
        ", ".join(part.rows.name for part in parts),
        StoredPrompts(tuple(parts)),
        num_too_long,
        mix_sets(sizes, weights) if len(sizes) > 1 else (),
        num_filtered,
        joined_digest(part.content.of(part.numbers) for part in parts),
    )


def load_prompts(
    source: str,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    count: int | None = None,
    tools: ToolsOf = no_tools,
    check_columns: CheckColumns = no_check,
) -> PromptSet:
    """Check every row of `source`; `count` keeps only the first that fit.

    `tools`: what the template is given. Prompts longer than `max_prompt_tokens` are counted and left out, never cut.
    Raises UserError: no chat template, column missing, empty or malformed row (file and line), nothing left.
    """
    part = check_rows(source, PromptReader(data, tokenizer, tools, check_columns=check_columns), max_prompt_tokens)
    kept = replace(part, numbers=part.numbers[:count])
    too_long, digest = len(part.rows) - len(part.numbers), part.content.of(kept.numbers)
    return PromptSet(source, StoredPrompts((kept,)), num_too_long=too_long, digest=digest)


def check_rows(source: str, reader: PromptReader, max_prompt_tokens: int) -> RowPrompts:
    """Read every row of `source` once, and return those whose prompt fits. Raises UserError as `load_prompts` does."""
    if not reader.tokenizer.chat_template:
        raise UserError(
            f"{reader.tokenizer.name_or_path or 'model.path'}: the tokenizer has no chat template: "
            "add chat_template.jinja or `chat_template` in tokenizer_config.json"
        )
    rows = read_rows(source, reader.data.source)
    if not len(rows):
        raise UserError(f"{source}: no rows: give a file with at least one prompt")
    reader.check_template(rows[0])
    fits, content = np.zeros(len(rows), dtype=bool), RowsDigest()
    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk = [rows[number] for number in range(start, min(start + ROWS_AT_ONCE, len(rows)))]
        texts = [reader.check(row) for row in chunk]
        for row in chunk:
            reader.check_columns({**row.columns, **reader.columns}, row.location)
        for row, text in zip(chunk, texts, strict=True):
            content.add(text, row.columns)
        fits[start : start + len(texts)] = [len(tokens) <= max_prompt_tokens for tokens in reader.tokenize(texts)]
    if not fits.any():
        raise UserError(
            f"{source}: all {len(rows)} prompts are longer than rollout.max_prompt_tokens={max_prompt_tokens}: "
            "raise it or give shorter prompts"
        )
    return RowPrompts(rows, np.flatnonzero(fits), reader, content)


def final_answer(text: str) -> str:
    """Extract GSM8K's answer, '... #### 1,234' -> '1234'; strip any other text."""
    match = re.search(r"####([^#\n]*)\s*$", text)
    answer = (match.group(1) if match else text).strip()
    is_number = re.fullmatch(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?", answer)
    return answer.replace(",", "") if match and is_number else answer


def _read_messages(row: Row, data: DataConfig) -> Messages:
    """Return the row's messages, or its text as one user message, after the system message of the settings."""
    prompt = _read_column(row, data.prompt_column, "data.prompt_column")
    location = f"{row.location}: column {data.prompt_column}"
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(chat, list) or not chat or not all(isinstance(message, Mapping) for message in chat):
        raise UserError(f"{location}: expected text or a list of chat messages")
    chat = [read_message(message, location) for message in chat]
    if not chat[-1]["content"].strip():
        raise UserError(f"{location}: the prompt is empty")
    if chat[-1]["role"] not in ("user", "tool"):
        raise UserError(f"{location}: the last message must be the user's, not {chat[-1]['role']}'s")
    if data.system_prompt and chat[0]["role"] != "system":
        return [{"role": "system", "content": data.system_prompt}, *chat]
    return chat


def _is_text(text: str) -> bool:
    """Return whether a text can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_answer(row: Row, data: DataConfig) -> str | None:
    if data.answer_column is None:
        return None
    value = _read_column(row, data.answer_column, "data.answer_column")
    text = _number_text(value) if isinstance(value, Real | Decimal) else value
    answer = final_answer(text) if isinstance(text, str) and _is_text(text) else ""
    if not answer:
        found = shorten(repr(value))
        raise UserError(
            f"{row.location}: column {data.answer_column}: expected an answer as text or number, found {found}"
        )
    return answer


def _number_text(value: Real | Decimal) -> str:
    """Return a number in digits, a fraction as 1/3; "" for a truth value and for what is not finite."""
    if isinstance(value, Rational):
        return "" if isinstance(value, bool) else str(value)
    number = Decimal(str(value))
    return f"{number:f}" if number.is_finite() else ""


def _read_column(row: Row, name: str, setting: str) -> Any:
    if has_column(row.columns, name):
        return read_column(row.columns, name)
    known = shorten(", ".join(map(str, row.columns)), 300) or "none"
    hint = " or to null" if setting == "data.answer_column" else ""
    raise UserError(
        f"{row.location}: no column {name}{did_you_mean_column(name, row.columns)}, the row has: {known}: "
        f"set {setting} to one of them{hint}"
    )


def _apply_chat_template(
    chat: Messages, row: Row, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]
) -> str:
    try:
        text = render_template(chat, tokenizer, tools)
    except Exception as error:  # a template is a program
        raise UserError(
            f"{row.location}: the tokenizer's chat template refuses the prompt: {one_line(error) or repr(error)}"
        ) from error
    if not _is_text(text):  # it may show calls of tools, and other fields of a message
        raise UserError(f"{row.location}: a message with half a character (a lone surrogate): write it anew")
    return text
