"""The mapping names exactly the tensors that transformers writes, with their shapes, also of published models."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.models.families import TRANSFORMERS_NAMES, family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from tests.models.published import PUBLISHED
from tests.sparse_attention import SPARSE
from tools.tiny.models import make_tiny, make_tokenizer

TINY: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
MOONLIGHT = {"q_lora_rank": None, "rope_scaling": None, "rope_theta": 50000.0, "n_group": 1, "topk_group": 1}
SIGMOID = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "hy_v3", *SPARSE)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [1], "num_experts": 4}),
    ("qwen3_next", {"mlp_only_layers": [1], "num_experts": 4}),
    ("qwen3_5_moe_text", {"num_experts": 4}),
    ("qwen3_5_text", {}),
    ("qwen2", {}),
    ("llama", {"head_dim": 16}),
    ("mixtral", {"num_local_experts": 4}),
    ("deepseek_v2", {"q_lora_rank": 16, "first_k_dense_replace": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 2, "n_shared_experts": 2}),
    ("deepseek_v3", MOONLIGHT),
    ("kimi_k2", {}),
    ("deepseek_v32", {}),
    ("glm_moe_dsa", {}),
    ("glm_moe_dsa", {"index_topk_freq": None, "indexer_types": ["full", "full", "shared"]}),
    ("glm_moe_dsa", {"index_topk_freq": None, "index_topk_pattern": "FSS"}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": True}),
    ("glm4_moe_lite", {}),
    ("hy_v3", {"num_shared_experts": 2}),
    ("gpt_oss", {"num_local_experts": 4}),
    ("minimax_m2", {}),
]


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_names_and_shapes_are_those_of_the_file(family: str, shape: dict[str, Any], tmp_path: Path) -> None:
    make_tiny(tmp_path, family, make_tokenizer(["apples"]), **TINY, **shape)
    with HfReader(tmp_path) as reader:  # stacked experts stand one by one
        saved = {name: reader.shape(name) for name in reader.names}
    hf = HfConfig.read(tmp_path)
    params = [param for param in family_of(hf).params(hf).values() if not param.alias]
    assert Counter(name for param in params for name in param.hf) == Counter(list(saved))
    assert {name: shape for param in params for name, shape in zip(param.hf, param.shapes, strict=True)} == saved
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_output_layer_is_an_alias(tied: bool, make_hf: Any, family: str) -> None:
    hf = make_hf(family, tie_word_embeddings=tied)
    params = family_of(hf).params(hf)
    output = params["output_layer.weight"]
    embedding = params["embedding.word_embeddings.weight"]
    assert (output.alias, embedding.alias) == (tied, False)
    assert output.hf == (embedding.hf if tied else ("lm_head.weight",))
    assert [param.name for param in params.values() if param.alias] == (["output_layer.weight"] if tied else [])


def test_only_expert_biases_and_norms_of_indexers_keep_float32(make_hf: Any, family: str) -> None:
    hf = make_hf(family)
    params = family_of(hf).params(hf)
    norms = [name for name in params if ".indexer.k_norm." in name]
    assert bool(norms) == (family in SPARSE)
    assert all(params[name].keep_float32 for name in norms)
    float32 = [param.name for param in params.values() if param.keep_float32 and param.name not in norms]
    layers = (1, 2) if family in SIGMOID else range(4) if family == "minimax_m2" else ()
    assert float32 == [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in layers]


def params_of(values: dict[str, Any]) -> list[Param]:
    hf = HfConfig(Path("published"), values)
    family = family_of(hf)
    assert family.config(hf)["num_layers"] == values["num_hidden_layers"]
    return [param for param in family.params(hf).values() if not param.alias]


def count_in_transformers(values: dict[str, Any]) -> int:
    model_type = TRANSFORMERS_NAMES.get(values["model_type"], values["model_type"])
    rest = {key: value for key, value in values.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **rest))
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_mapping_has_each_tensor_once(name: str) -> None:
    values, published_size = PUBLISHED[name]
    params = params_of(values)
    assert {count for _, count in Counter(name for param in params for name in param.hf).items()} == {1}
    elements = sum(math.prod(shape) for param in params for shape in param.shapes)
    assert elements == count_in_transformers(values)
    assert elements == pytest.approx(published_size, rel=0.01)
