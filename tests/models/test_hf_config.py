"""Reading config.json: required numbers, refused files."""

from pathlib import Path

import pytest

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.errors import UserError


def config(**values: object) -> HfConfig:
    return HfConfig(Path("folder"), values)


def test_numbers_are_required_and_a_missing_one_names_the_file() -> None:
    hf = config(hidden_size=64, rms_norm_eps="1e-6", head_dim=None)
    assert (hf.int("hidden_size"), hf.float("rms_norm_eps")) == (64, 1e-6)
    for key in ("head_dim", "kv_lora_rank"):
        with pytest.raises(UserError, match=f"folder/config.json: {key} is missing"):
            hf.int(key)
    assert hf.get("kv_lora_rank", 3) == 3


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json does not exist: give a Hugging Face folder"):
        HfConfig.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"')
    with pytest.raises(UserError, match=r"config.json: not valid JSON"):
        HfConfig.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "tie_word_embeddings": true}')
    hf = HfConfig.read(tmp_path)
    assert (hf.model_type, hf.tied, hf.path) == ("qwen3", True, tmp_path)
