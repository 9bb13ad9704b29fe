"""Files of rows, and the train sets that are read from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.prompts import PromptReader, PromptSet, load_train_prompts
from tools.tiny.models import make_tokenizer

TOKENIZER = make_tokenizer(["How", "many", "apples"])


def write(path: Path, rows: Sequence[Any]) -> str:
    """Write each row as a line of JSON, or the line that it is; return the path."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(train: Any, limit: int = 100, **data: Any) -> PromptSet:
    """Read `data.train` with up to `limit` tokens of a prompt."""
    return load_train_prompts(PromptReader(DataConfig(train=train, **data), TOKENIZER, limit))
