"""Parameters per rank: the closed form against the real Megatron model, and both against the published total."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.stages import layers_of_stages
from grpo_mp.planner.model_configs import published_config
from grpo_mp.planner.parameter_count import (
    critic_parameter_counts,
    local_parameter_counts,
    with_mtp_layer,
)
from grpo_mp.policy.megatron_config import transformer_config
from grpo_mp.utils.errors import UserError
from tests.planner.jobs import job_of, settings_of
from tests.planner.meta_model import megatron_parameter_counts

LAST = "num_layers_in_last_pipeline_stage"
FREE = "pipeline_model_parallel_layout"
CASES: list[tuple[str, int, dict[str, int], dict[str, Any]]] = [
    ("qwen2.5-7b", 8, {"tensor": 4}, {}),
    ("llama-3.2-1b", 8, {"tensor": 2}, {}),  # tied
    ("llama-3.2-1b", 8, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 4}, {}),
    ("mixtral-8x22b", 16, {"tensor": 4, "pipeline": 2, "expert": 2, "expert_tensor": 2}, {}),
    ("moonlight-16b-a3b", 16, {"tensor": 2, "pipeline": 2, "expert": 4}, {LAST: 13}),
    ("qwen3-235b-a22b", 64, {"tensor": 4, "pipeline": 4, "context": 2, "expert": 16}, {FREE: "Et*24|t*24|t*23|t*23L"}),
    ("qwen3.5-35b-a3b", 16, {"tensor": 2, "pipeline": 2, "expert": 8}, {}),
    ("minimax-m2", 16, {"tensor": 4, "pipeline": 2, "expert": 8}, {}),
    ("hy3-preview", 64, {"tensor": 8, "pipeline": 2, "expert": 32}, {}),
    ("gpt-oss-20b", 8, {"tensor": 2, "pipeline": 2, "expert": 4}, {}),
    ("kimi-k2", 256, {"tensor": 8, "pipeline": 4, "expert": 64}, {"num_layers_in_first_pipeline_stage": 13, LAST: 16}),
    ("deepseek-r1", 128, {"tensor": 8, "pipeline": 4, "context": 4, "expert": 32}, {LAST: 13}),
    ("deepseek-r1", 64, {"tensor": 4, "pipeline": 2, "expert": 16, "expert_tensor": 2}, {FREE: "Et*31|(tt)*15L"}),
]


@pytest.mark.parametrize(("name", "ranks", "sizes", "megatron"), CASES)
def test_closed_form_equals_what_megatron_builds(
    name: str, ranks: int, sizes: dict[str, int], megatron: dict[str, Any]
) -> None:
    settings = settings_of(layout=sizes, training={"megatron_args": megatron})
    hf = published_config(name)
    stage_layers = layers_of_stages(hf.int("num_hidden_layers"), settings.layout, megatron)
    assert local_parameter_counts(hf, settings.layout, stage_layers) == megatron_parameter_counts(settings, hf, ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "megatron"),
    [
        ("deepseek-r1", 64, {"tensor": 4, "pipeline": 2, "expert": 16, "expert_tensor": 2}, {FREE: "Et*31|(tt)*15L"}),
        ("glm-4.5-air", 32, {"tensor": 8, "pipeline": 2, "virtual_pipeline": 23, "expert": 16}, {}),
        ("glm-4.5-air", 16, {"tensor": 8, "expert": 16}, {}),
        ("glm-4.7-flash", 16, {"tensor": 4, "expert": 16}, {}),
        ("hy3-preview", 16, {"tensor": 8, "expert": 16}, {}),
        ("qwen3-next-80b-a3b", 8, {"tensor": 2, "pipeline": 2, "expert": 4}, {}),
        ("qwen3.5-35b-a3b", 4, {"tensor": 2, "expert": 4}, {}),
        ("qwen3.8-27b", 4, {"tensor": 2, "pipeline": 2}, {}),
    ],
)
def test_a_layer_that_predicts_ahead_is_counted_where_megatron_builds_it(
    name: str, ranks: int, sizes: dict[str, int], megatron: dict[str, Any]
) -> None:
    settings = settings_of(layout=sizes, training={"megatron_args": megatron})
    hf = replace(published_config(name), trains_mtp=True)
    stage_layers = with_mtp_layer(layers_of_stages(hf.int("num_hidden_layers"), settings.layout, megatron), hf)
    counts = local_parameter_counts(hf, settings.layout, stage_layers)
    assert counts == megatron_parameter_counts(settings, hf, ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "megatron"),
    [
        ("llama-3.2-1b", 8, {"tensor": 2}, {}),  # tied, and the critic is not
        ("deepseek-r1", 128, {"tensor": 8, "pipeline": 4, "context": 4, "expert": 32}, {LAST: 13}),
        ("glm-4.5-air", 16, {"tensor": 8, "expert": 16}, {}),
    ],
)
def test_a_critic_is_counted_as_megatron_builds_it(
    name: str, ranks: int, sizes: dict[str, int], megatron: dict[str, Any]
) -> None:
    """The policy's layers without one that predicts ahead; its head has one column on every tensor-parallel rank."""
    settings = settings_of(layout=sizes, training={"megatron_args": megatron})
    hf = published_config(name)
    stage_layers = layers_of_stages(hf.int("num_hidden_layers"), settings.layout, megatron)
    counts = critic_parameter_counts(hf, settings.layout, stage_layers)
    assert counts == megatron_parameter_counts(settings, hf, ranks, critic=True)
    if not hf.tied:
        policy = local_parameter_counts(hf, settings.layout, stage_layers)
        output = hf.int("vocab_size") // sizes["tensor"] * hf.int("hidden_size")
        assert policy[-1].dense - counts[-1].dense == output - hf.int("hidden_size")
        assert policy[:-1] == counts[:-1]
        with_mtp = with_mtp_layer(stage_layers, replace(hf, trains_mtp=hf.get("num_nextn_predict_layers") == 1))
        assert critic_parameter_counts(replace(hf, trains_mtp=True), settings.layout, with_mtp) == counts


def test_chunks_are_dealt_to_stages_in_turn() -> None:
    assert layers_of_stages(8, LayoutConfig(pipeline=2, virtual_pipeline=2), {}) == ((0, 1, 4, 5), (2, 3, 6, 7))
    first = {"num_layers_in_first_pipeline_stage": 1}
    assert layers_of_stages(5, LayoutConfig(pipeline=3), first) == ((0,), (1, 2), (3, 4))
    free = {FREE: [["embedding", "decoder"], ["decoder"] * 3 + ["loss"]]}
    assert layers_of_stages(4, LayoutConfig(pipeline=2), free) == ((0,), (1, 2, 3))


def test_stages_that_are_not_those_of_the_layout_are_refused() -> None:
    """By a plan, and by what a job makes of the settings: Megatron takes the number of virtual stages from the text."""
    sizes = {"pipeline": 2}
    megatron = {"megatron_args": {FREE: "Et*7|t*7|t*7|t*7L"}}
    words = r"on 4 stages, .*virtual_pipeline=null has 2: write as many stages"
    with pytest.raises(UserError, match=words):
        job_of("qwen2.5-7b", "h100-80", 1, layout=sizes, training=megatron)
    settings = settings_of(layout=sizes, training=megatron)
    with pytest.raises(UserError, match=words):
        transformer_config(settings.layout, settings.training, "bfloat16", published_config("qwen2.5-7b"))
