"""The Megatron settings that a family makes of a config, and the configs that it refuses."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_mp.models.families import FAMILIES, family_of
from grpo_mp.utils.errors import UserError
from tests.models.conftest import MakeHf
from tools.tiny.models import LLAMA3, TINY_CONFIGS

LONG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN = TINY_CONFIGS["deepseek_v3"]["rope_scaling"]


@pytest.mark.parametrize(("model_type", "nearest"), [("qwen3moe", "qwen3_moe"), ("deepseek_v4", "deepseek_v3")])
def test_an_unknown_model_type_names_the_nearest(model_type: str, nearest: str, make_hf: MakeHf) -> None:
    with pytest.raises(
        UserError, match=rf"config.json: model_type '{model_type}' .*did you mean {nearest}\?.*supported: qwen3"
    ):
        family_of(make_hf("qwen3", model_type=model_type))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deepseek_v3", "scoring_func", "softmax"),
        ("qwen3", "hidden_act", "gelu"),
        ("qwen3_moe", "use_sliding_window", True),
        ("qwen3", "attention_bias", True),
        ("mixtral", "sliding_window", 4096),
        ("kimi_k2", "norm_topk_prob", False),
        ("glm4_moe_lite", "partial_rotary_factor", 0.5),
    ],
)
def test_unsupported_values_are_refused(family: str, key: str, value: Any, make_hf: MakeHf) -> None:
    with pytest.raises(UserError, match=f"config.json: {key}={value!r} is not supported"):
        FAMILIES[family].config(make_hf(family, **{key: value}))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope type 'dynamic' is not supported, only",
        ),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "original_max_position_embeddings of the rope",
        ),
        ("qwen3", {"rope_scaling": {"rope_type": "linear"}}, "factor of the rope scaling is missing"),
        ("qwen3", {"rope_scaling": LONG | {"mscale": 0.7}}, "only one of mscale and mscale_all_dim"),
        ("qwen3", {"rope_scaling": LONG | {"attn_factor": 0.9}}, "1.13863 for transformers.* 1.02477 for engines"),
        ("qwen3", {"rope_scaling": LONG | {"attention_factor": 1.0}}, r"set both: to F and to F / 1.13862943"),
        ("glm4_moe", {"rope_scaling": LONG}, "yarn with partial_rotary_factor=0.5 is not supported"),
        ("qwen3_5_text", {"rope_scaling": LONG}, "yarn with partial_rotary_factor=0.25 is not supported"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor=2.0 of llama3's rope scaling"),
        ("deepseek_v3", {"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor=1.5 of yarn"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor of the rope .* missing"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["dense"] * 3},
            "mlp_layer_types, .* first_k_dense_replace=1, .* set",
        ),
        ("glm4_moe_lite", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor of rope_param"),
        ("hy_v3", {"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types, .* first_k_dense_replace=1, .* set both"),
        ("minimax_m2", {"use_qk_norm": None}, "use_qk_norm is not true"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("hy_v3", {"route_norm": None}, "route_norm is not true"),
        ("hy_v3", {"rope_scaling": LONG}, "engines ignore the rope scaling of Hy3: remove it"),
        ("glm_moe_dsa", {"indexer_rope_interleave": None}, "indexer_rope_interleave is not true"),
        ("glm_moe_dsa", {"index_skip_topk_offset": None}, "index_skip_topk_offset is missing"),
        ("glm_moe_dsa", {"index_topk_pattern": "SFS"}, "does not give each of the 3 layers"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSFF"}, "does not give each of the 3 layers"),
        ("kimi_k2", {"rope_scaling": YARN | {"mscale": None}}, "mscale_all_dim but without mscale .*: set both"),
    ],
)
def test_combinations_that_megatron_computes_otherwise_are_refused(
    family: str, changes: dict[str, Any], message: str, make_hf: MakeHf
) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        FAMILIES[family].config(make_hf(family, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 0.5},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"mscale": 0.0, "mscale_all_dim": 0.0},
        {"attention_factor": 1.0, "attn_factor": 0.8782488562869419},  # the second is for engines
    ],
)
def test_attention_has_the_scale_of_transformers_with_yarn(changes: dict[str, Any], make_hf: MakeHf) -> None:
    rope = LONG | {"rope_theta": 1e6} | changes
    own = AutoConfig.for_model("qwen3", rope_parameters=dict(rope), head_dim=128)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](own, torch.device("cpu"))
    config = FAMILIES["qwen3"].config(make_hf("qwen3", rope_scaling=rope, head_dim=128))
    assert config["softmax_scale"] == pytest.approx(factor**2 / 128**0.5, rel=1e-9)


def test_too_many_tokens_name_the_reach_of_yarn(make_hf: MakeHf) -> None:
    hf = make_hf("qwen3", rope_scaling=LONG, max_position_embeddings=40960)
    hf.check_positions(40960, "the longest request")
    with pytest.raises(UserError, match=r"only 40960 positions .*: lower it, or set max_position_.* 131072"):
        hf.check_positions(100_000, "the longest request")


def test_groups_that_limit_nothing_are_left_out(make_hf: MakeHf) -> None:
    def groups(family: str, **changes: Any) -> tuple[int | None, int | None]:
        config = FAMILIES[family].config(make_hf(family, **changes))
        return config.get("moe_router_num_groups"), config.get("moe_router_group_topk")

    limited = {"topk_method": "group_limited_greedy", "n_group": 4}
    assert groups("deepseek_v2", **limited, topk_group=3) == (4, 3)
    assert groups("deepseek_v2", **limited, topk_group=4) == (None, None)
    assert groups("deepseek_v2", n_group=4, topk_group=2) == (None, None)  # greedy
    assert groups("deepseek_v3") == (4, 2)
    assert groups("deepseek_v3", n_group=1, topk_group=1) == groups("kimi_k2") == groups("glm4_moe") == (None, None)


def test_another_architecture_of_the_same_model_type_is_refused(make_hf: MakeHf) -> None:
    hf = make_hf("llama", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(
        UserError, match=r"architectures=.*Classification'\] is not supported, only \['LlamaForCausalLM'\]"
    ):
        family_of(hf)


def test_mscale_counts_only_together_with_mscale_all_dim(make_hf: MakeHf) -> None:
    def mscale(**changes: Any) -> tuple[float, float]:
        config = FAMILIES["deepseek_v3"].config(make_hf("deepseek_v3", rope_scaling=YARN | changes))
        return config["mscale"], config["mscale_all_dim"]

    assert mscale(mscale=0.7, mscale_all_dim=0.5) == (0.7, 0.5)
    assert mscale(mscale=0.7, mscale_all_dim=0) == mscale(mscale=None, mscale_all_dim=None) == (1.0, 0.0)


def test_schedules_of_indexers(make_hf: MakeHf) -> None:
    def schedule(layers: int, **changes: Any) -> tuple[int, int]:
        config = FAMILIES["glm_moe_dsa"].config(make_hf("glm_moe_dsa", num_hidden_layers=layers, **changes))
        return config["dsa_indexer_topk_freq"], config["dsa_indexer_skip_topk_offset"]

    full = [1, 2, 3, *range(7, 79, 4)]  # layers of GLM-5.2, counted from 1
    types = ["full" if layer in full else "shared" for layer in range(1, 79)]
    assert schedule(78, indexer_types=types) == (4, 3)
    assert schedule(78, index_topk_freq=4, index_skip_topk_offset=3) == (4, 3)
    assert schedule(6, index_topk_pattern="FSSFSS") == (3, 1)
    assert schedule(6, index_topk_pattern="FFFFFF") == schedule(6, index_topk_freq=1) == (1, 0)
    assert schedule(2, index_topk_freq=4, index_skip_topk_offset=3) == (1, 0)


def test_moe_layers(make_hf: MakeHf) -> None:
    def layers(family: str, **changes: Any) -> list[int]:
        config = FAMILIES[family].config(make_hf(family, num_hidden_layers=6, **changes))
        return list(config["moe_layer_freq"])

    assert layers("deepseek_v3", first_k_dense_replace=2) == [0, 0, 1, 1, 1, 1]
    assert layers("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=1) == [1, 0, 1, 1, 1, 1]
    assert layers("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=2) == [0, 1, 0, 1, 0, 1]
