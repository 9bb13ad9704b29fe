"""Overrides of training.megatron_args and fused kernels in Megatron's configs."""

import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import MLATransformerConfig

from grpo_mp.config.sections import TrainingConfig
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8_products import check_fp8_products
from grpo_mp.planner.model_configs import published_config
from grpo_mp.platform import fused_fields
from grpo_mp.policy.megatron_config import ARCHITECTURE, check_fp8, check_overrides
from grpo_mp.utils.errors import UserError
from tests.planner.jobs import settings_of
from tests.planner.meta_model import built_on_meta


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("moe_pad_expert_input_to_capacity", "yes", "'yes': give a valid boolean"),
        ("recompute_num_layers", True, "True: give a valid integer"),
        ("moe_token_dispatcher_type", "flux", "'flux': give 'allgather', 'alltoall' or 'flex'"),
        ("moe_token_dispatcher_type", "flex", "flex: Megatron cannot import the locked DeepEP: set alltoall"),
        ("exp_avg_dtype", "fp8", "'fp8': give 'float32' or 'bfloat16'"),
        ("attention_backend", "flush", "'flush': give 'flash', 'fused', "),
    ],
)
def test_values_of_other_types_are_refused(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^training\.megatron_args\.{name}={sentence}"):
        check_overrides({name: value})


def test_fp8_training_is_refused_without_a_gpu() -> None:
    with pytest.raises(UserError, match=r"^training\.fp8_format=e4m3 needs a GPU and model\.dtype=bfloat16"):
        check_fp8(TrainingConfig(fp8_format="e4m3"), "bfloat16")
    check_fp8(TrainingConfig(), "float32")


@pytest.mark.parametrize(
    ("name", "tensor", "refused"),
    [
        ("qwen3.5-35b-a3b", 2, ""),
        ("qwen3.8-27b", 2, ""),
        ("qwen3.8-27b", 4, "4120 x 5120 elements of decoder.layers.0.self_attention.in_proj.weight"),  # 16 * 257.5
        ("glm-4.5-air", 8, "4096 x 1368 elements of decoder.layers.0.mlp.linear_fc2.weight"),  # 16 * 85.5
    ],
)
def test_fp8_training_is_refused_by_the_matrices_that_megatron_builds(name: str, tensor: int, refused: str) -> None:
    """TransformerEngine reads each matrix along both axes, 16 bytes at a time."""
    hf = published_config(name)
    layers = {"num_hidden_layers": 4} | (
        {"layer_types": hf.values["layer_types"][:4]} if "layer_types" in hf.values else {}
    )
    hf = replace(hf, values=hf.values | layers)
    with built_on_meta(settings_of(layout={"tensor": tensor}), hf, world_size=tensor, rank=0) as (model,):
        linear = (ColumnParallelLinear, RowParallelLinear)
        inner = [
            module for part, module in model.named_modules() if isinstance(module, linear) and "output" not in part
        ]
        shapes = {tuple(module.weight.shape) for module in inner}
    assert len(shapes) > 3
    fits = all(axis % 16 == 0 for shape in shapes for axis in shape)
    check = partial(check_fp8_products, family_of(hf).rules(hf), tensor, 1)
    if fits:
        assert not refused
        check()
    else:
        sentence = f"training.fp8_format: with layout.tensor={tensor} a rank holds {refused}, and FP8 products need "
        with pytest.raises(UserError, match=re.escape(sentence)):
            check()


def test_the_models_own_fields_are_refused() -> None:
    for name in (*ARCHITECTURE, "hidden_dropout", "attention_dropout"):
        assert name in {field.name for field in fields(MLATransformerConfig)}
        with pytest.raises(UserError, match=rf"^training\.megatron_args\.{name} cannot be set: "):
            check_overrides({name: 3})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek-r1", {"apply_rope_fusion": True, "moe_permute_fusion": True}),
        (
            "moonlight-16b-a3b",
            {
                "apply_rope_fusion": True,
                "moe_permute_fusion": True,
                "rope_type": "yarn",
                "rotary_scaling_factor": 1.0,
            },
        ),
    ],
)
def test_fused_kernels_by_model(name: str, fields: dict[str, object]) -> None:
    hf = published_config(name)
    assert fused_fields(family_of(hf).config(hf)) == fields


def test_fused_kernels_of_sparse_attention() -> None:
    hf = published_config("deepseek-r1")
    sparse = family_of(hf).config(hf) | {"experimental_attention_variant": "dsa"}
    fields = {"apply_rope_fusion": False, "moe_permute_fusion": True, "dsa_kernel_backend": "tilelang"}
    assert fused_fields(sparse) == fields


def test_no_fused_rotary_embedding_for_heads_that_its_blocks_do_not_divide() -> None:
    model = family_of(hf := published_config("moonlight-16b-a3b")).config(hf)
    assert fused_fields(model | {"num_attention_heads": 20}) == {"apply_rope_fusion": False, "moe_permute_fusion": True}


@pytest.mark.nightly  # about the locked packages only
def test_the_fused_rotary_embedding_equals_the_plain_one() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/policy/rope_in_interpreter.py"]
    result = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith("... ")


def test_yarn_of_factor_1_equals_the_plain_rotary_embedding() -> None:
    """Megatron fuses the rotary embedding of latent attention with yarn only."""
    arguments = {"kv_channels": 64, "rotary_percent": 1.0, "rotary_base": 50000, "use_cpu_initialization": True}
    plain = RotaryEmbedding(**arguments, cp_group=None)(8192, packed_seq=True)
    yarn, mscale = YarnRotaryEmbedding(**arguments, scaling_factor=1.0, original_max_position_embeddings=4096)(
        8192, packed_seq=True
    )
    assert mscale == 1.0
    torch.testing.assert_close(yarn.cos(), plain.cos(), atol=1e-4, rtol=0)
    torch.testing.assert_close(yarn.sin(), plain.sin(), atol=1e-4, rtol=0)
