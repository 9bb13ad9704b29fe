"""CPU modules: arithmetic against formulas."""

from types import SimpleNamespace

import megatron.core  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mp.platform import megatron_fields
from grpo_mp.platform.te_layers import ColumnParallelGroupedLinear

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
