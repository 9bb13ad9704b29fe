"""Prompt sets: their rows are read, rendered by the chat template and tokenized on access."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Rational, Real
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from transformers import PreTrainedTokenizerBase

from grpo_mp.config.data_sections import DataConfig, TrainSetConfig
from grpo_mp.data.cursor import Mixture, mix_sets
from grpo_mp.data.messages import read_messages
from grpo_mp.data.rows import Row, Rows, read_rows
from grpo_mp.data.set_checks import joined_digest, left_out, row_bytes
from grpo_mp.data.template import check_template, conversation_text, render_template
from grpo_mp.rewards.math import boxed_answer
from grpo_mp.rewards.settings import DATA_SET
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import did_you_mean_column, has_column, read_column, shorten
from grpo_mp.utils.types import Prompt

PassRates = dict[str, float]  # by the prompt's text


def read_pass_rates(name: str) -> PassRates:
    """Return the pass rate of each prompt in a file with columns `prompt` and `pass_rate`, or `is_correct`.

    `is_correct` has one row per sample, as `grpo-mp evaluate` writes it. A row in which it is null does not count.
    """
    verdicts = defaultdict[str, list[float]](list)
    for row in read_rows(name):
        prompt, verdict = row.columns.get("prompt"), row.columns.get("pass_rate", row.columns.get("is_correct"))
        if verdict is None and "is_correct" in row.columns:
            continue
        if not isinstance(prompt, str) or not isinstance(verdict, bool | int | float) or not 0 <= verdict <= 1:
            raise UserError(f"{row.location}: expected a prompt with is_correct (true or false) or pass_rate (0 to 1)")
        verdicts[prompt].append(float(verdict))
    return {prompt: fmean(values) for prompt, values in verdicts.items()}


def within_pass_rates(texts: Iterable[str], file: str, train_set: TrainSetConfig) -> list[bool]:
    """Return for each prompt whether its pass rate is in the set's range; True if the file lacks the prompt."""
    lowest, highest = train_set.min_pass_rate, train_set.max_pass_rate
    rates = read_pass_rates(file)
    measured = [rates.get(text) for text in texts]
    if not any(rate is not None for rate in measured):
        raise UserError(f"{file}: none of its prompts is in {train_set.path}: measure those")
    kept = [rate is None or lowest <= rate <= highest for rate in measured]
    if not any(kept):
        raise UserError(f"{train_set.path}: no prompt has a pass rate from {lowest:g} to {highest:g}: widen the range")
    return kept


BOXES = re.compile(r"\}[\s$]*(?:,|,?\s*(?:\\text\{\s*)?\b(?:and|or)\b\s*\}?)[\s$]*\\boxed\b")
ROWS_AT_ONCE = 1024  # rows in one call of the tokenizer
Messages = list[dict[str, Any]]
Schemas = Sequence[dict[str, Any]]  # JSON schemas of tools, for the chat template
CheckColumns = Callable[[Mapping[str, Any], str], None]  # (columns of a row, its location); raises UserError


def no_check(columns: Mapping[str, Any], location: str) -> None:
    """Accept the columns of any row."""


@dataclass(frozen=True)
class PromptReader:
    """Converts rows to prompts."""

    data: DataConfig  # columns and system prompt
    tokenizer: PreTrainedTokenizerBase
    tools: Schemas = ()
    columns: Mapping[str, Any] = field(default_factory=dict)  # added to those of the row
    check_columns: CheckColumns = no_check  # checks the columns that rewards need

    def messages(self, row: Row) -> Messages:
        """Return the messages of a row; a plain text becomes one user message."""
        column = self.data.prompt_column
        location = f"{row.location}: column {column}"
        chat = read_messages(_read_column(row, column, "data.prompt_column"), location, "user")
        if not chat[-1]["content"].strip():
            raise UserError(f"{location}: the prompt is empty")
        if chat[-1]["role"] not in ("user", "tool"):
            raise UserError(f"{location}: the last message must be the user's, not {chat[-1]['role']}'s")
        return chat

    def answer(self, row: Row) -> str | None:
        column = self.data.answer_column
        if column is None:
            return None
        value = _read_column(row, column, "data.answer_column")
        text = _number_text(value) if isinstance(value, Real | Decimal) else value
        answer = final_answer(text) if isinstance(text, str) else ""
        if not answer:
            found = shorten(repr(value))
            raise UserError(f"{row.location}: column {column}: expected an answer as text or number, found {found}")
        return answer

    def with_system(self, messages: Messages) -> Messages:
        """Prepend the system prompt of the settings, unless the messages begin with a system message."""
        if self.data.system_prompt and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.data.system_prompt}, *messages]
        return messages

    def render(self, row: Row, messages: Messages) -> str:
        """Render the messages of a row with the chat template."""
        chat = self.with_system(messages)
        tools = self.tools
        variables = self.data.chat_template_kwargs
        try:
            return render_template(chat, self.tokenizer, tools, variables=variables)
        except Exception as error:  # a template is a program
            raise UserError(
                f"{row.location}: the tokenizer's chat template refuses the prompt: {one_line(error) or repr(error)}"
            ) from error

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        # The template has written the special tokens; the tokenizer would write a second BOS token.
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def read(self, row: Row, index: int) -> Prompt:
        """Return the prompt of a row. `index`: its index in the prompt set."""
        messages = self.messages(row)
        (tokens,) = self.tokenize([self.render(row, messages)])
        return Prompt(
            index,
            conversation_text(messages),
            tokens=tuple(tokens),
            answer=self.answer(row),
            columns={**row.columns, **self.columns},
            messages=tuple(self.with_system(messages)),
            column=self.data.prompt_column,
        )


@dataclass(frozen=True, eq=False)
class RowPrompts:
    """Prompts of one file or source, read on access; memory holds only the numbers of their rows."""

    rows: Rows
    numbers: npt.NDArray[np.int64]
    reader: PromptReader
    too_long: int  # number of rows that were left out
    content: bytes  # digest of all rows

    @property
    def digest(self) -> str:
        return joined_digest((self.content, np.ascontiguousarray(self.numbers, dtype="<i8").tobytes()))

    def texts(self) -> Iterator[str]:
        return (conversation_text(self.reader.messages(self.rows[int(number)])) for number in self.numbers)

    def warnings(self, setting: str, max_prompt_tokens: int, outcome: str) -> Iterator[str]:
        count, limit = self.too_long + len(self.numbers), f"rollout.max_prompt_tokens={max_prompt_tokens}"
        yield from left_out(setting, self.too_long, rows=count, unit="prompts", limit=limit, outcome=outcome)


@dataclass(frozen=True, eq=False)
class StoredPrompts(Sequence[Prompt]):
    """Prompts of several sources, one after the other."""

    parts: tuple[RowPrompts, ...]

    def __len__(self) -> int:
        return sum(len(part.numbers) for part in self.parts)

    def __getitem__(self, index: Any) -> Any:
        """Return one prompt, or the list of prompts of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = index
        for part in self.parts:
            if place < len(part.numbers):
                return part.reader.read(part.rows[int(part.numbers[place])], index)
            place -= len(part.numbers)
        raise IndexError(index)


@dataclass(frozen=True)
class PromptSet:
    """Prompts within the token limit, in the order of their rows; `prompts[i].index == i`."""

    source: str
    prompts: Sequence[Prompt]
    num_too_long: int  # rows whose prompt has more tokens than the limit
    mixture: Mixture = ()  # share of each set in an epoch
    num_filtered: int = 0  # prompts that were left out by their pass rate
    digest: str = ""  # of the content of its rows; "" if no rows were read
    warnings: tuple[str, ...] = ()  # shown at every start

    @property
    def epoch_size(self) -> int:
        return sum(share.count for share in self.mixture) or len(self)

    def first_rendered(self) -> str:
        """Render the first prompt with the chat template; "" if no rows were read."""
        for part in self._parts:
            row = part.rows[int(part.numbers[0])]
            return part.reader.render(row, part.reader.messages(row))
        return ""

    @property
    def _parts(self) -> tuple[RowPrompts, ...]:
        return self.prompts.parts if isinstance(self.prompts, StoredPrompts) else ()

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
    tools: Schemas = (),
    check_columns: CheckColumns = no_check,
) -> PromptSet:
    """Read and check the data sets of `data.train`.

    With several data sets, or if a set has weights of its own, the column `data_set` of its prompts holds the set's
    name.
    """
    parts = list[RowPrompts]()
    num_filtered = 0
    warnings = list[str]()
    for name, train_set in data.train.items():
        is_named = len(data.train) > 1 or train_set.reward is not None
        own_columns = {DATA_SET: name} if is_named else {}
        reader = PromptReader(
            data.of_set(train_set), tokenizer, tools=tools, columns=own_columns, check_columns=check_columns
        )
        part = check_rows(train_set.path, reader, max_prompt_tokens)
        setting = "data.train" if name == "train" else f"data.train.{name}"
        warnings += part.warnings(setting, max_prompt_tokens, "left out")
        if file := train_set.pass_rates:
            kept = part.numbers[within_pass_rates(part.texts(), file, train_set)]
            num_filtered += len(part.numbers) - len(kept)
            part = replace(part, numbers=kept)
        parts.append(part)
    sizes = [len(part.numbers) for part in parts]
    weights = [train_set.weight for train_set in data.train.values()]
    return PromptSet(
        ", ".join(part.rows.name for part in parts),
        StoredPrompts(tuple(parts)),
        num_too_long=sum(part.too_long for part in parts),
        mixture=mix_sets(sizes, weights) if len(sizes) > 1 else (),
        num_filtered=num_filtered,
        digest=joined_digest(part.digest for part in parts),
        warnings=tuple(warnings),
    )


def load_eval_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    tools: Schemas = (),
    check_columns: CheckColumns = no_check,
) -> dict[str, PromptSet]:
    """Read and check the data sets of `data.eval`; each keeps its first `max_prompts` rows."""
    return {
        name: load_prompts(
            own.path,
            data.of_set(own),
            tokenizer=tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            count=own.max_prompts,
            tools=tools,
            check_columns=check_columns,
            eval_set=f"data.eval.{name}",
        )
        for name, own in data.eval.items()
    }


def load_prompts(
    source: str,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    count: int | None = None,
    tools: Schemas = (),
    check_columns: CheckColumns = no_check,
    eval_set: str = "data.eval",
) -> PromptSet:
    """Read and check every row of `source`, a set to evaluate on; `count` keeps only the first rows.

    `tools`: JSON schemas for the template; `eval_set`: setting of the set, for warnings. Prompts longer than
    `max_prompt_tokens` are counted and left out, never cut.
    """
    reader = PromptReader(data, tokenizer, tools, check_columns=check_columns)
    part = check_rows(source, reader, max_prompt_tokens, count)
    warnings = tuple(part.warnings(eval_set, max_prompt_tokens, "count as wrong"))
    return PromptSet(source, StoredPrompts((part,)), part.too_long, digest=part.digest, warnings=warnings)


def check_rows(source: str, reader: PromptReader, max_prompt_tokens: int, count: int | None = None) -> RowPrompts:
    """Read and check every row of `source`; of the first `count` prompts, keep those within the token limit."""
    rows = read_rows(source, reader.data.source)
    if not len(rows):
        raise UserError(f"{source}: no rows: give a file with at least one prompt")
    check_template(reader.tokenizer)
    fits, content = np.zeros(len(rows), dtype=bool), xxhash.xxh3_128()
    for start in range(0, len(rows), ROWS_AT_ONCE):
        end, texts = min(start + ROWS_AT_ONCE, len(rows)), list[str]()
        for row in (rows[number] for number in range(start, end)):
            texts.append(reader.render(row, reader.messages(row)))
            reader.answer(row)
            reader.check_columns({**row.columns, **reader.columns}, row.location)
            content.update(row_bytes(texts[-1], row.columns))
        fits[start:end] = [len(tokens) <= max_prompt_tokens for tokens in reader.tokenize(texts)]
    fits = fits[:count]
    if not fits.any():
        raise UserError(
            f"{source}: all {len(fits)} prompts are longer than rollout.max_prompt_tokens={max_prompt_tokens}: "
            "raise it or give shorter prompts"
        )
    return RowPrompts(
        rows, np.flatnonzero(fits), reader=reader, too_long=len(fits) - int(fits.sum()), content=content.digest()
    )


def final_answer(text: str) -> str:
    r"""Return the answer in a text: after GSM8K's ####, else in the last \boxed{} of a solution, else the whole text.

    Boxes that are separated only by a comma, `and` or `or` are one answer: then the whole text is returned.
    """
    match = re.search(r"####([^#\n]*)\s*$", text)
    answer = (match.group(1) if match else text).strip()
    if match and re.fullmatch(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?", answer):
        return answer.replace(",", "")
    return answer if BOXES.search(answer) else boxed_answer(answer) or answer


def _number_text(value: Real | Decimal) -> str:
    """Write a number in digits and a fraction as 1/3; "" for a boolean and for a number that is not finite."""
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
