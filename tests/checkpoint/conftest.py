"""A small Hugging Face folder, made once."""

from pathlib import Path

import pytest

from tools.tiny.models import make_tiny, make_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=2, hidden_size=64)
    return folder
