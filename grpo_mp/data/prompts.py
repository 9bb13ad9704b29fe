"""Prompt sets: rows are read by the column mapping, rendered by the chat template and tokenized."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_mp.config.sections import DataConfig
from grpo_mp.data.cursor import Mixture, mix_sets
from grpo_mp.data.pass_rates import within_pass_rates
from grpo_mp.data.rows import Row, read_rows
from grpo_mp.errors import UserError, did_you_mean
from grpo_mp.types import Prompt

ROLES = ("system", "user", "assistant", "tool")
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptSet:
    """Prompts that fit the limit, in the order of their rows; `prompts[i].index == i`."""

    source: str
    prompts: tuple[Prompt, ...]
    num_too_long: int  # rows whose prompt has more tokens than the limit
    mixture: Mixture = ()  # how sets are mixed
    num_filtered: int = 0  # prompts that are left out for their pass rate

    @property
    def epoch_size(self) -> int:
        """Return the prompts of an epoch."""
        return sum(share.count for share in self.mixture) or len(self)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)


def load_train_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, tools: Sequence[dict[str, Any]] = ()
) -> PromptSet:
    """Read the sets of `data.train`; rewards see the set's name as column `data_set`. Raises UserError."""
    prompts, sizes, read = list[Prompt](), list[int](), list[PromptSet]()
    for name, train_set in data.train.items():
        own = train_set.model_dump(include={"source", "prompt_column", "answer_column", "system_prompt"})
        columns = data.model_copy(update={key: value for key, value in own.items() if value is not None})
        read.append(load_prompts(train_set.path, columns, tokenizer, max_prompt_tokens, tools=tools))
        kept = within_pass_rates(list(read[-1]), train_set)
        named = {"data_set": name} if len(data.train) > 1 else {}
        prompts += [
            replace(prompt, index=len(prompts) + place, columns=prompt.columns | named)
            for place, prompt in enumerate(kept)
        ]
        sizes.append(len(kept))
    weights = [train_set.weight for train_set in data.train.values()]
    return PromptSet(
        ", ".join(one.source for one in read),
        tuple(prompts),
        sum(one.num_too_long for one in read),
        mix_sets(sizes, weights) if len(sizes) > 1 else (),
        sum(map(len, read)) - len(prompts),
    )


def load_prompts(
    source: str,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    count: int | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> PromptSet:
    """Read, check and tokenize every row of `source`; `count` keeps only the first that fit.

    `tools`: JSON schemas for the template. Prompts longer than `max_prompt_tokens` are counted and left out, never cut.
    Raises UserError: no chat template, column missing, empty or malformed row (file and line), nothing left.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer.name_or_path or 'model.path'}: the tokenizer has no chat template: "
            "add chat_template.jinja or `chat_template` in tokenizer_config.json"
        )
    rows = list(read_rows(source, data.source))
    if not rows:
        raise UserError(f"{source}: no rows: give a file with at least one prompt")
    chats = [_read_messages(row, data) for row in rows]
    answers = [_read_answer(row, data) for row in rows]
    texts = [_apply_chat_template(chat, row, tokenizer, tools) for chat, row in zip(chats, rows, strict=True)]
    # The template has written the special tokens already; adding them here would begin prompts with two.
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
    fitting = [i for i in range(len(rows)) if len(tokens[i]) <= max_prompt_tokens]
    if not fitting:
        raise UserError(
            f"{source}: all {len(rows)} prompts are longer than rollout.max_prompt_tokens={max_prompt_tokens}: "
            "raise it or give shorter prompts"
        )
    prompts = (
        Prompt(index, chats[i][-1]["content"], tuple(tokens[i]), answers[i], rows[i].columns, tuple(chats[i]))
        for index, i in enumerate(fitting[:count])
    )
    return PromptSet(source, tuple(prompts), num_too_long=len(rows) - len(fitting))


def final_answer(text: str) -> str:
    """Extract GSM8K's answer, '... #### 1,234' -> '1234'; strip any other text."""
    match = re.search(r"####([^#\n]*)\s*$", text)
    answer = (match.group(1) if match else text).strip()
    is_number = re.fullmatch(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?", answer)
    return answer.replace(",", "") if match and is_number else answer


def _read_messages(row: Row, data: DataConfig) -> Messages:
    """Return the row's messages, or its text as one user message, after the system message of the settings."""
    prompt = _read_column(row, data.prompt_column, "data.prompt_column")
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    _check_chat(chat, row, data.prompt_column)
    if data.system_prompt and chat[0]["role"] != "system":
        return [{"role": "system", "content": data.system_prompt}, *chat]
    return list(chat)


def _check_chat(chat: Any, row: Row, column: str) -> None:
    location = f"{row.location}: column {column}"
    if not isinstance(chat, list) or not chat or not all(isinstance(message, dict) for message in chat):
        raise UserError(f"{location}: expected text or a list of chat messages")
    for message in chat:
        content = message.get("content")
        if message.get("role") not in ROLES or not isinstance(content, str):
            raise UserError(f"{location}: a message needs role ({', '.join(ROLES)}) and text content")
    if not chat[-1]["content"].strip():
        raise UserError(f"{location}: the prompt is empty")
    if chat[-1]["role"] not in ("user", "tool"):
        raise UserError(f"{location}: the last message must be the user's, not {chat[-1]['role']}'s")


def _read_answer(row: Row, data: DataConfig) -> str | None:
    if data.answer_column is None:
        return None
    value = _read_column(row, data.answer_column, "data.answer_column")
    answer = final_answer(str(value)) if isinstance(value, str | int | float) else ""
    if not answer:
        raise UserError(
            f"{row.location}: column {data.answer_column}: expected an answer as text or number, found {value!r}"
        )
    return answer


def _read_column(row: Row, name: str, setting: str) -> Any:
    if name in row.columns:
        return row.columns[name]
    known = ", ".join(row.columns) or "none"
    hint = " or to null" if setting == "data.answer_column" else ""
    raise UserError(
        f"{row.location}: no column {name}{did_you_mean(name, row.columns)}, the row has: {known}: "
        f"set {setting} to one of them{hint}"
    )


def _apply_chat_template(
    chat: Messages, row: Row, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]
) -> str:
    try:
        return tokenizer.apply_chat_template(
            chat, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise UserError(f"{row.location}: the tokenizer's chat template refuses the prompt: {error}") from error
