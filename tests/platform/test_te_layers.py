"""CPU modules: arithmetic against formulas, and the names and gradients of a whole tiny model."""

from types import SimpleNamespace

import megatron.core  # noqa: F401
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from grpo_mp.platform import megatron_fields
from grpo_mp.platform.te_layers import (
    ColumnParallelGroupedLinear,
    LayerNormColumnParallelLinear,
    Norm,
    rms_norm,
)

COMMON = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    **megatron_fields(interleaved=False, model={}),
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": [0, 1],
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_norm_equals_the_formula(dtype, tolerance):
    norm = Norm(TransformerConfig(**COMMON, params_dtype=dtype), 32, 1e-3)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(5, 32).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_norm_gradient_equals_torch_in_float64(dtype, tolerance):
    x, weight, grad = (torch.randn(shape).to(dtype) for shape in ((3, 7, 16), (16,), (3, 7, 16)))
    results = []
    for function, work_dtype in ((rms_norm, dtype), (lambda x, w, eps: F.rms_norm(x, (16,), w, eps), torch.float64)):
        leaves = [tensor.to(work_dtype, copy=True).requires_grad_() for tensor in (x, weight)]
        function(*leaves, 1e-3).backward(grad.to(work_dtype))
        results.append([leaf.grad for leaf in leaves])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype is dtype
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=10 * tolerance)


def grouped_linear(experts: int) -> ColumnParallelGroupedLinear:
    config = TransformerConfig(**COMMON, perform_initialization=False)
    groups = SimpleNamespace(ep=None, expt_tp=None, expt_dp=None)
    layer = ColumnParallelGroupedLinear(
        experts, 6, 4, config=config, init_method=torch.nn.init.normal_, bias=False, pg_collection=groups
    )
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    return layer


@pytest.mark.parametrize("splits", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
def test_grouped_linear_and_zero_gradient_of_idle_experts(splits):
    layer, x = grouped_linear(4), torch.randn(sum(splits), 6, requires_grad=True)
    out, bias = layer(x, splits)
    assert bias is None
    out.sum().backward()
    expert = torch.repeat_interleave(torch.tensor(splits))
    for i in range(4):
        weight = getattr(layer, f"weight{i}")
        torch.testing.assert_close(out[expert == i], torch.einsum("ti,oi->to", x[expert == i], weight))
        torch.testing.assert_close(weight.grad, x[expert == i].sum(0).expand(4, 6))


@pytest.fixture(scope="module")
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_rank")
def test_layer_norm_linear_equals_the_formulas():
    config = TransformerConfig(**COMMON | {"layernorm_epsilon": 1e-2})
    layer = LayerNormColumnParallelLinear(
        32, 8, config=config, init_method=torch.nn.init.normal_, bias=False, gather_output=False
    )
    torch.nn.init.uniform_(layer.layer_norm_weight, 0.5, 2.0)
    x = torch.randn(3, 2, 32)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * layer.layer_norm_weight
    torch.testing.assert_close(layer(x)[0], torch.einsum("sbi,oi->sbo", normed, layer.weight), rtol=1e-5, atol=1e-5)


def tiny_model(config: TransformerConfig) -> GPTModel:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    return GPTModel(config, spec, 50, 64, share_embeddings_and_output_weights=False, position_embedding_type="rope")


def packed_gradients(config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Return the gradient of every parameter after two packed sequences."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = tiny_model(config)
    tokens = torch.arange(12)[None]
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=7, max_seqlen_kv=7)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    model(tokens, positions, None, labels=tokens + 1, packed_seq_params=packed).sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}


RECOMPUTE = {
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("shape", ["deepseek", "qwen"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_every_parameter_has_a_gradient_and_recompute_changes_none(shape, recompute):
    config_class, fields = (
        (MLATransformerConfig, LATENT) if shape == "deepseek" else (TransformerConfig, {"num_query_groups": 2})
    )
    expected = packed_gradients(config_class(**COMMON, **EXPERTS, **fields))
    recomputed = packed_gradients(config_class(**COMMON, **EXPERTS, **fields, **RECOMPUTE[recompute]))
    assert all(grad is not None and grad.abs().sum() > 0 for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(recomputed[name], grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("single_rank")
def test_parameter_names_equal_transformer_engine():
    names = dict(tiny_model(MLATransformerConfig(**COMMON, **EXPERTS, **LATENT)).named_parameters())
    attention = {n.removeprefix("decoder.layers.0.self_attention.") for n in names if "layers.0.self_attention" in n}
    assert attention == {
        "linear_q_down_proj.weight",
        "linear_q_up_proj.layer_norm_weight",
        "linear_q_up_proj.weight",
        "linear_kv_down_proj.weight",
        "linear_kv_up_proj.layer_norm_weight",
        "linear_kv_up_proj.weight",
        "linear_proj.weight",
    }
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert names["decoder.layers.1.mlp.experts.linear_fc1.weight3"].shape == (32, 32)
    assert names["decoder.layers.1.mlp.experts.linear_fc2.weight3"].shape == (32, 16)
