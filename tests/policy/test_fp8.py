"""Linear layers in FP8: which they are, what a whole model computes by them, and what they are refused for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.config.sections import LayoutConfig, ModelConfig, TrainingConfig
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.platform.fp8_linear import Fp8Matmul
from grpo_mp.policy.forward import sequence_logits
from grpo_mp.policy.fp8 import check_fp8
from grpo_mp.policy.load_models import policy_tensors, transformers_model
from grpo_mp.policy.model import use_fp8
from grpo_mp.policy.policy import check_policy
from grpo_mp.utils.errors import UserError
from tests.platform.test_fp8_linear import E4M3, rounded
from tools.tiny.models import make_tiny, make_tokenizer

# A head of 128 and one group: blocks of 128 rows are those of the matrices that Megatron has together.
ALIGNED = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}


def test_a_model_computes_what_transformers_does_with_operands_rounded(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", make_tokenizer(["apples"]), **ALIGNED)
    tokens = torch.randint(5, 30, (40,), generator=torch.Generator().manual_seed(0))
    reference = transformers_model(tmp_path)
    with torch.no_grad():
        plain = reference(tokens[None]).logits[0]
        for name, layer in reference.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                layer.weight.copy_(rounded(layer.weight, (128, 128), E4M3))
                layer.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0][0], (1, 128), E4M3).float()[None])
        expected = reference(tokens[None]).logits[0]
        with policy_tensors(tmp_path) as (model, _):
            use_fp8([model], "e4m3")
            actual = sequence_logits(model, tokens)
    error, by_rounding = ((actual - other).norm() / plain.norm() for other in (expected, plain))
    assert error < 0.002  # a value at the middle between two goes to either
    assert 0.01 < by_rounding < 0.2


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_in_fp8_are_those_of_fp8_releases(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, family, make_tokenizer(["apples"]), num_hidden_layers=2)
    params = family_of(HfConfig.read(tmp_path)).params(HfConfig.read(tmp_path))
    with policy_tensors(tmp_path) as (model, tensors):
        names = {id(tensor): name for name, tensor in tensors.items()}
        use_fp8([model], "e4m3")
        in_fp8 = {
            names[id(weight)]
            for layer in model.modules()
            if any(isinstance(getattr(value, "__self__", None), Fp8Matmul) for value in vars(layer).values())
            for name, weight in layer.named_parameters(recurse=False)
            if name.startswith("weight")
        }
    assert in_fp8 == {name for name, param in params.items() if param.is_projection}


DEFAULT, TENSOR_2 = LayoutConfig(), LayoutConfig(tensor=2)


@pytest.mark.parametrize(
    ("training", "dtype", "capability", "sentence"),
    [
        ({"fp8_recipe": "mxfp8"}, "bfloat16", None, r"fp8_recipe=mxfp8 needs GPUs \(B200 .*on a CPU set .*=blockwise"),
        ({"fp8_recipe": "mxfp8"}, "bfloat16", 9.0, r"compute capability 10 \(B200 or newer\), these have 9: set"),
        ({}, "bfloat16", 8.0, r"fp8_recipe=blockwise needs GPUs of compute capability 9 \(H100 or newer\)"),
        ({}, "float32", 9.0, "needs model.dtype=bfloat16 on a GPU, not float32"),
        ({"megatron_args": {"first_last_layers_bf16": True}}, "bfloat16", None, "leave out .*first_last_layers_bf16"),
    ],
)
def test_what_a_device_cannot_do_is_refused(
    training: dict[str, Any], dtype: str, capability: float | None, sentence: str
) -> None:
    given = TrainingConfig(fp8_format="e4m3", **training)
    with pytest.raises(UserError, match=sentence):
        check_fp8(given, dtype, DEFAULT, (), capability)
    check_fp8(TrainingConfig(**training), dtype, DEFAULT, (), capability)  # without FP8


def test_matrices_of_odd_sizes_are_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3", make_tokenizer(["apples"]), intermediate_size=48)
    model, training = ModelConfig(path=tmp_path, dtype="float32"), TrainingConfig(fp8_format="hybrid")
    check_policy(model.read_config(), model, DEFAULT, training, 1)
    with pytest.raises(UserError, match=r"linear_fc2.weight has \(128, 24\) with 2 tensor-parallel parts: choose a sm"):
        check_policy(model.read_config(), model, TENSOR_2, training, 2)
