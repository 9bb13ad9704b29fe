"""Prompt sets: their rows are read, rendered by the chat template and tokenized on access."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Rational, Real
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.algorithms.distillation_settings import of_set
from grpo_mp.config.data_sections import DataConfig, TrainSetConfig
from grpo_mp.data.rows import Row, read_rows
from grpo_mp.data.self_teacher import with_demonstration
from grpo_mp.data.sets import (
    DataSet,
    Limit,
    Measured,
    Part,
    column_of,
    join_parts,
    read_part,
)
from grpo_mp.data.template import check_template, conversation_text, read_messages, render_template
from grpo_mp.rewards.math import boxed_answer
from grpo_mp.rewards.settings import DATA_SET
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import shorten
from grpo_mp.utils.types import Prompt

PassRates = dict[str, float]  # by the prompt's text


def read_pass_rates(name: str) -> PassRates:
    """Return the pass rate of each prompt in a file with columns `prompt` and `pass_rate`, or `is_correct`.

    `is_correct` has one row per sample, as `grpo-mp evaluate` writes it. A row in which it is null does not count.
    """
    verdicts = defaultdict[str, list[float]](list)
    for row in read_rows(name):
        prompt = row.columns.get("prompt")
        verdict = row.columns.get("pass_rate", row.columns.get("is_correct"))
        if verdict is None and "is_correct" in row.columns:
            continue
        if not isinstance(prompt, str) or not isinstance(verdict, bool | int | float) or not 0 <= verdict <= 1:
            raise UserError(f"{row.location}: expected a prompt with is_correct (true or false) or pass_rate (0 to 1)")
        verdicts[prompt].append(float(verdict))
    return {prompt: fmean(values) for prompt, values in verdicts.items()}


def within_pass_rates(texts: Iterable[str], file: str, train_set: TrainSetConfig) -> list[bool]:
    """Return for each prompt whether its pass rate is in the set's range; True if the file lacks the prompt."""
    lowest, highest = train_set.pass_rate_range
    rates = read_pass_rates(file)
    measured = [rates.get(text) for text in texts]
    if not any(rate is not None for rate in measured):
        raise UserError(f"{file}: none of its prompts is in {train_set.path}: measure those")
    kept = [rate is None or lowest <= rate <= highest for rate in measured]
    if not any(kept):
        raise UserError(f"{train_set.path}: no prompt has a pass rate from {lowest:g} to {highest:g}: widen the range")
    return kept


BOXES = re.compile(r"\}[\s$]*(?:,|,?\s*(?:\\text\{\s*)?\b(?:and|or)\b\s*\}?)[\s$]*\\boxed\b")
PromptSet = DataSet[Prompt]
Messages = list[dict[str, Any]]
Schemas = Sequence[dict[str, Any]]  # JSON schemas of tools, for the chat template
CheckColumns = Callable[[Mapping[str, Any], str], None]  # (columns of a row, its location); raises UserError


@dataclass(frozen=True)
class PromptReader:
    """Converts rows to prompts."""

    data: DataConfig  # columns and system prompt
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    tools: Schemas = ()
    check_columns: CheckColumns = lambda columns, location: None  # checks the columns that rewards need
    columns: Mapping[str, Any] = field(default_factory=dict)  # added to those of the row
    demonstration: str | None = None  # column that the policy sees as its own teacher

    def messages(self, row: Row) -> Messages:
        """Return the messages of a row; a plain text becomes one user message."""
        column = self.data.prompt_column
        location = f"{row.location}: column {column}"
        chat = read_messages(column_of(row, column, "set data.prompt_column to one of them"), location, "user")
        if not chat[-1]["content"].strip():
            raise UserError(f"{location}: the prompt is empty")
        if chat[-1]["role"] not in ("user", "tool"):
            raise UserError(f"{location}: the last message must be the user's, not {chat[-1]['role']}'s")
        return chat

    def answer(self, row: Row) -> str | None:
        column = self.data.answer_column
        if column is None:
            return None
        value = column_of(row, column, "set data.answer_column to one of them or to null")
        text = _number_text(value) if isinstance(value, Real | Decimal) else value
        answer = final_answer(text) if isinstance(text, str) else ""
        if not answer:
            found = shorten(repr(value))
            raise UserError(f"{row.location}: column {column}: expected an answer as text or number, found {found}")
        return answer

    def measure(self, rows: Sequence[Row]) -> Iterator[Measured]:
        """Check rows, and measure their prompts; the prompt with a demonstration counts if it is longer."""
        texts = list[str]()
        shown = list[str]()
        problems = list[str]()
        for row in rows:
            messages = self.messages(row)
            problems.append(conversation_text(messages))
            asked = self._with_system(messages)
            texts.append(self._render(row, asked))
            if self.demonstration:
                asked = with_demonstration(asked, row.columns, self.demonstration, row.location)
            shown.append(self._render(row, asked) if self.demonstration else "")
            self.answer(row)
            self.check_columns({**row.columns, **self.columns}, row.location)
        sizes = map(max, map(len, self._tokenize(texts)), map(len, self._tokenize(shown)))
        for row, text, size, problem in zip(rows, texts, sizes, problems, strict=True):
            yield Measured(size, size, (text, row.columns), problem)

    def read(self, row: Row, index: int) -> Prompt:
        """Return the prompt of a row. `index`: its index in the prompt set."""
        messages = self.messages(row)
        asked = self._with_system(messages)
        (tokens,) = self._tokenize([self._render(row, asked)])
        return Prompt(
            index,
            conversation_text(messages),
            tokens=tuple(tokens),
            answer=self.answer(row),
            columns={**row.columns, **self.columns},
            messages=tuple(asked),
            column=self.data.prompt_column,
        )

    def read_part(self, path: str, count: int | None = None) -> Part[Prompt]:
        """Read and check the rows of a source, or the first `count`."""
        check_template(self.tokenizer, self.data.system_prompt)
        unit = "prompts, with their demonstration," if self.demonstration else "prompts"
        limit = Limit("rollout.max_prompt_tokens", self.max_tokens, unit)
        return read_part(read_rows(path, self.data.source), self.measure, self.read, limit, count)

    def _with_system(self, messages: Messages) -> Messages:
        if self.data.system_prompt and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.data.system_prompt}, *messages]
        return messages

    def _render(self, row: Row, messages: Messages) -> str:
        try:
            return render_template(messages, self.tokenizer, self.tools, variables=self.data.chat_template_kwargs)
        except Exception as error:  # a template is a program
            raise UserError(
                f"{row.location}: the tokenizer's chat template refuses the prompt: {one_line(error) or repr(error)}"
            ) from error

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        # The template has written the special tokens; the tokenizer would write a second BOS token.
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]


def load_train_prompts(reader: PromptReader, demonstrations: Mapping[str, str | None] | None = None) -> PromptSet:
    """Read and check the data sets of `data.train`.

    With several data sets, or if a set has weights of its own, the column `data_set` of its prompts holds the set's
    name. `demonstrations`: see `DistillationConfig`.
    """
    parts = dict[str, Part[Prompt]]()
    too_easy_or_hard = 0
    sets = reader.data.train
    for name, own in sets.items():
        columns = {DATA_SET: name} if len(sets) > 1 or own.reward is not None else {}
        shown = of_set(demonstrations, name) if demonstrations else None
        own_reader = replace(reader, data=reader.data.of_set(own), columns=columns, demonstration=shown)
        part = own_reader.read_part(own.path)
        if own.pass_rates:
            texts = (conversation_text(own_reader.messages(part.rows[int(number)])) for number in part.numbers)
            kept = within_pass_rates(texts, own.pass_rates, own)
            too_easy_or_hard += kept.count(False)
            part = replace(part, numbers=part.numbers[kept], sizes=part.sizes[kept], problems=part.problems[kept])
        parts[name] = part
    joined = join_parts(parts, "data.train", "left out", [own.weight for own in sets.values()])
    return replace(joined, filtered=too_easy_or_hard)


def load_eval_prompts(reader: PromptReader) -> dict[str, PromptSet]:
    """Read and check the data sets of `data.eval`; each keeps its first `max_prompts` rows."""
    sets = {}
    for name, own in reader.data.eval.items():
        part = replace(reader, data=reader.data.of_set(own)).read_part(own.path, own.max_prompts)
        sets[name] = join_parts({name: part}, "data.eval", "count as wrong")
    return sets


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
