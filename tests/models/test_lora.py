"""Adapters of a mapping: their names, shapes and parts; targets, as peft takes them; what is refused."""

from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config import check_settings
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import adapter_params, check_adapters, check_targets
from grpo_mp.utils.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.models.published import PUBLISHED


def params_of(name: str) -> dict[str, Any]:
    hf = HfConfig(Path(name), PUBLISHED[name][0])
    return family_of(hf).params(hf)


def test_adapters_of_a_fused_projection_are_those_of_its_modules() -> None:
    adapters = adapter_params(params_of("qwen2.5-7b"), 8, ("q_proj", "v_proj"))
    assert len(adapters) == 4 * 28
    layer = "decoder.layers.3.self_attention.linear_qkv.lora_"
    a = adapters[f"{layer}A.v_proj.weight"]
    b = adapters[f"{layer}B.v_proj.weight"]
    assert a.hf == ("model.layers.3.self_attn.v_proj.lora_A.weight",)
    assert (a.shapes, a.tp_dim, b.shapes, b.tp_dim) == (((8, 3584),), None, ((512, 8),), 0)


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (("qproj",), r"no projection of this model is 'qproj' \(did you mean q_proj\?\); it has down_proj, gate_proj"),
        (
            ("q_proj", "up_proj"),
            "adapters of experts' up_proj only beside down_proj, gate_proj: add these, too",
        ),
    ],
)
def test_targets_that_cannot_be_are_refused(targets: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_targets(params_of("qwen3-30b-a3b").values(), targets)


@pytest.mark.parametrize(("tensor", "expert", "expert_tensor"), [(1, 2, 1), (2, 1, 1)])
def test_adapters_of_divided_experts_alone_are_refused(tensor: int, expert: int, expert_tensor: int) -> None:
    """Megatron makes an optimizer without parameters then, which has no state to save."""
    params = params_of("qwen3-30b-a3b")
    experts = ("gate_proj", "up_proj", "down_proj")
    with pytest.raises(UserError, match=r"needs adapters outside of experts, too: add o_proj"):
        check_adapters(params, experts, tensor, expert, expert_tensor)
    check_adapters(params, experts, 1, 1, 1)
    check_adapters(params, (*experts, "o_proj"), tensor, expert, expert_tensor)


@pytest.mark.parametrize(
    ("model", "megatron_args", "sentence"),
    [
        ({}, {"moe_router_bias_update_rate": 0.1}, "moe_router_bias_update_rate changes a bias of the routers"),
        ({}, {"moe_shared_expert_overlap": True}, "model.lora: training.megatron_args.moe_shared_expert_overlap"),
        (None, {}, "model.lora has no adapters for the multi-token-prediction layer"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    model: dict[str, Any] | None, megatron_args: dict[str, Any], sentence: str
) -> None:
    tree: dict[str, Any] = MINIMAL_SETTINGS | {"training": {"megatron_args": megatron_args}}
    lora = {"rank": 8, "alpha": 16.0} | (model or {})
    mtp = 0.1 if model is None else 0.0
    with pytest.raises(UserError, match=sentence):
        check_settings(tree | {"model": {"path": "x", "lora": lora, "mtp_loss_scaling_factor": mtp}}, "test")


def test_a_reference_cannot_be_mixed_of_adapters() -> None:
    kl = {"coef": 0.1, "ref_update_every": 2}
    tree = MINIMAL_SETTINGS | {"model": {"path": "x", "lora": {"rank": 8, "alpha": 16.0}}}
    with pytest.raises(UserError, match=r"kl\.ref_update_mix=0\.6 would mix A and B"):
        check_settings(tree | {"algorithm": {"kl": kl}}, "test")
    check_settings(tree | {"algorithm": {"kl": kl | {"ref_update_mix": 1.0}}}, "test")
