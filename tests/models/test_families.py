"""Which settings a family makes of a config, and which configs it refuses."""

from typing import Any

import pytest

from grpo_mp.errors import UserError
from grpo_mp.models.families import FAMILIES, family_of
from tests.models.conftest import MakeHf


def test_each_family_is_found_by_its_model_type(family: str, make_hf: MakeHf) -> None:
    assert family_of(make_hf(family)) is FAMILIES[family]


@pytest.mark.parametrize(("wrong", "near"), [("qwen3moe", "qwen3_moe"), ("deepseek_v4", "deepseek_v3")])
def test_an_unknown_model_type_names_the_nearest(wrong: str, near: str, make_hf: MakeHf) -> None:
    with pytest.raises(
        UserError, match=rf"config.json: model_type '{wrong}' .*did you mean {near}\?.*supported: qwen3"
    ):
        family_of(make_hf("qwen3", model_type=wrong))


def test_a_config_without_model_type_is_refused(make_hf: MakeHf) -> None:
    hf = make_hf("qwen3")
    del hf.values["model_type"]
    with pytest.raises(UserError, match="not supported"):
        family_of(hf)


@pytest.mark.parametrize(
    ("of", "key", "value"),
    [
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "rope_interleave", False),
        ("qwen3", "hidden_act", "gelu"),
        ("qwen3_moe", "use_sliding_window", True),
        ("qwen3", "attention_bias", True),
    ],
)
def test_what_a_family_cannot_compute_is_refused(of: str, key: str, value: Any, make_hf: MakeHf) -> None:
    with pytest.raises(UserError, match=f"config.json: {key}={value!r} is not supported"):
        FAMILIES[of].config(make_hf(of, **{key: value}))


def test_mixture_layers(make_hf: MakeHf) -> None:
    def layers(of: str, **changes: Any) -> list[int]:
        found: list[int] = FAMILIES[of].config(make_hf(of, num_hidden_layers=6, **changes))["moe_layer_freq"]
        return found

    assert layers("deepseek_v3", first_k_dense_replace=2) == [0, 0, 1, 1, 1, 1]
    assert layers("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=1) == [1, 0, 1, 1, 1, 1]
    assert layers("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=2) == [0, 1, 0, 1, 0, 1]


def test_every_mixture_layer_has_experts_and_every_other_an_mlp(family: str, make_hf: MakeHf) -> None:
    hf = make_hf(family)
    config, names = FAMILIES[family].config(hf), FAMILIES[family].params(hf).keys()
    for layer, sparse in enumerate(config.get("moe_layer_freq", [0] * config["num_layers"])):
        prefix = f"decoder.layers.{layer}.mlp."
        experts = [name for name in names if name.startswith(prefix + "experts.linear_fc1")]
        assert len(experts) == (config["num_moe_experts"] if sparse else 0)
        assert (prefix + "router.weight" in names) == bool(sparse)
        assert (prefix + "linear_fc1.weight" in names) == (not sparse)


def test_yarn_and_plain_rotary(make_hf: MakeHf) -> None:
    yarn = FAMILIES["deepseek_v3"].config(make_hf("deepseek_v3"))
    assert (yarn["rope_type"], yarn["rotary_scaling_factor"], yarn["original_max_position_embeddings"]) == (
        "yarn",
        4.0,
        256,
    )
    plain = FAMILIES["deepseek_v3"].config(make_hf("deepseek_v3", rope_scaling=None, rope_theta=5e4))
    assert (plain["rope_type"], plain["rotary_base"]) == ("rope", 5e4)
    with pytest.raises(UserError, match="rope type 'llama3' is not supported"):
        FAMILIES["deepseek_v3"].config(make_hf("deepseek_v3", rope_scaling={"rope_type": "llama3"}))
