"""config.json as transformers 4 and 5 write it: the same model, computed alike; refused files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from grpo_mp.checkpoint.hf_reader import check_layers
from grpo_mp.models.families import FAMILIES, TRANSFORMERS_NAMES, family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.forward import sequence_logits
from grpo_mp.policy.load_models import policy_tensors, transformers_model
from grpo_mp.utils.errors import UserError
from tests.models.published import PUBLISHED
from tools.tiny.models import TINY_CONFIGS, make_tiny, make_tokenizer

TOLERANCE = 2e-6  # of the largest logit, in float32
THETA = 123456.0  # no default of any family
ROPES: dict[str, dict[str, Any]] = {
    "llama": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    "deepseek_v3": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 24}
    | {"beta_slow": 2, "mscale": 0.8, "mscale_all_dim": 0.8},
    "glm4_moe": {"rope_type": "default", "partial_rotary_factor": 0.25},
}
ROPES["deepseek_v2"] = ROPES["deepseek_v3"]


def saved_by_transformers_5(values: dict[str, Any], folder: Path) -> HfConfig:
    model_type = TRANSFORMERS_NAMES.get(values["model_type"], values["model_type"])
    rest = {key: value for key, value in values.items() if key != "model_type"}
    AutoConfig.for_model(model_type, **json.loads(json.dumps(rest))).save_pretrained(folder)
    hf = HfConfig.read(folder)
    assert "rope_theta" not in hf.values
    assert hf.values["transformers_version"].startswith("5.")
    return hf


def family_settings(hf: HfConfig) -> tuple[Any, ...]:
    family = family_of(hf)
    config = family.config(hf)
    rotary = {} if config.get("multi_latent_attention") else family.rotary(hf)
    return config, family.params(hf), rotary, hf.rope["rope_theta"], hf.rope["rope_type"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_mean_the_same_after_transformers_5_saved_them(name: str, tmp_path: Path) -> None:
    values, _ = PUBLISHED[name]
    published = HfConfig(tmp_path, values)
    saved = saved_by_transformers_5(values, tmp_path)
    assert family_settings(saved) == family_settings(published)
    layers = saved.int("num_hidden_layers") + int(values.get("num_nextn_predict_layers") or 0)
    check_layers([f"model.layers.{layers - 1}.norm.weight"], saved)


def family_values(family: str) -> dict[str, Any]:
    rope = {"rope_theta": THETA, "rope_type": "default"} | ROPES.get(family, {})
    # transformers does not save full_attention_interval: without it, the published interval counts.
    others = ("rope_theta", "rope_scaling", "full_attention_interval")
    shape = {name: value for name, value in TINY_CONFIGS[family].items() if name not in others}
    return shape | {"rope_parameters": rope, "vocab_size": 128, "model_type": TRANSFORMERS_NAMES.get(family, family)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_reads_what_transformers_5_computes_with(family: str, tmp_path: Path) -> None:
    saved = saved_by_transformers_5(family_values(family), tmp_path)
    own = AutoConfig.from_pretrained(tmp_path)
    config, params, rotary, theta, rope_type = family_settings(saved)
    assert (theta, rope_type) == (own.rope_parameters["rope_theta"], own.rope_parameters["rope_type"])
    assert theta == THETA
    counts = [getattr(own, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts")]
    assert config.get("num_moe_experts") == next(filter(None, counts), None)
    assert sum(param.expert is not None for param in params.values()) % (config.get("num_moe_experts") or 1) == 0
    if rotary:
        assert rotary["rotary_percent"] == own.rope_parameters.get("partial_rotary_factor", 1.0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "mixtral", "deepseek_v3", "glm4_moe"])
def test_logits_of_a_config_of_transformers_5(family: str, tmp_path: Path) -> None:
    rope = {"rope_theta": THETA, "rope_type": "default"} | ROPES.get(family, {})
    changes = {"rope_scaling": None, "rope_theta": None, "initializer_range": 0.1, "num_hidden_layers": 2}
    make_tiny(tmp_path / "model", family, make_tokenizer(["apples"]), **changes, rope_parameters=rope)
    file = tmp_path / "model" / "config.json"
    values = {name: value for name, value in json.loads(file.read_text()).items() if value is not None}
    values.pop("partial_rotary_factor", None)
    file.write_text(json.dumps({name: value for name, value in values.items() if name != "num_experts"}))
    tokens = torch.randint(values["vocab_size"], (4, 32), generator=torch.Generator().manual_seed(0))
    expected = transformers_model(tmp_path / "model")(tokens).logits
    with policy_tensors(tmp_path / "model") as (policy, _):
        logits = torch.stack([sequence_logits(policy, row)[:, : values["vocab_size"]] for row in tokens])
    assert float((logits - expected).abs().max() / expected.abs().max()) <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 4}, "num_experts=4 and num_local_experts=8 contradict each other"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "of single kinds of layers are not supported"),
        ({"num_local_experts": None}, "num_experts is missing"),
    ],
)
def test_contradicting_names_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = saved_by_transformers_5(family_values("qwen3_moe"), tmp_path).values | change
    with pytest.raises(UserError, match=message):
        family_settings(HfConfig(tmp_path, values))


@pytest.mark.parametrize(
    "rope_settings",
    [
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
        {"rope_theta": 5.0, "rope_scaling": ROPES["llama"], "rope_parameters": {"rope_theta": 7.0}},
        {"rope_scaling": ROPES["llama"] | {"rope_theta": 6.0}, "rope_parameters": {"rope_theta": 7.0}},
        {"rope_scaling": None, "rope_parameters": None},
    ],
)
def test_transformers_5_decides_which_of_two_settings_counts(rope_settings: dict[str, Any], tmp_path: Path) -> None:
    own = AutoConfig.for_model(
        "llama", **TINY_CONFIGS["llama"] | {"rope_scaling": None} | json.loads(json.dumps(rope_settings))
    )
    values = {"model_type": "llama"} | rope_settings
    rope = HfConfig(tmp_path, values).rope
    assert {name: rope[name] for name in own.rope_parameters} == own.rope_parameters


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
