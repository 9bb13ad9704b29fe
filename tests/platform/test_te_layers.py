"""CPU modules and FusedAdam: arithmetic against formulas and torch's own optimizers."""

from types import SimpleNamespace

import megatron.core  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mp.platform import megatron_fields
from grpo_mp.platform.megatron_patches import FusedAdam
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


def grouped_linear(experts: int, bias: bool = False, skip_bias_add: bool = False) -> ColumnParallelGroupedLinear:
    config = TransformerConfig(**COMMON, perform_initialization=False)
    groups = SimpleNamespace(ep=None, expt_tp=None, expt_dp=None)
    biases = {"bias": bias, "skip_bias_add": skip_bias_add}
    layer = ColumnParallelGroupedLinear(
        experts, 6, 4, config=config, init_method=torch.nn.init.normal_, pg_collection=groups, **biases
    )
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    return layer


@pytest.mark.parametrize("splits", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
def test_biases_of_experts_are_added_or_returned(splits):
    layer = grouped_linear(4, bias=True)
    x = torch.randn(sum(splits), 6)
    kept = grouped_linear(4, bias=True, skip_bias_add=True)
    kept.load_state_dict(layer.state_dict())
    (out, none) = layer(x, splits)
    (plain, biases) = kept(x, splits)
    assert none is None
    assert biases == [kept.bias0, kept.bias1, kept.bias2, kept.bias3]
    expert = torch.repeat_interleave(torch.tensor(splits))
    torch.testing.assert_close(out, plain + torch.stack(biases)[expert])
    out.sum().backward()
    for i, count in enumerate(splits):
        torch.testing.assert_close(getattr(layer, f"bias{i}").grad, torch.full((4,), float(count)))


@pytest.mark.parametrize("splits", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
def test_grouped_linear_and_zero_gradient_of_idle_experts(splits):
    layer = grouped_linear(4)
    x = torch.randn(sum(splits), 6, requires_grad=True)
    out, bias = layer(x, splits)
    assert bias is None
    out.sum().backward()
    expert = torch.repeat_interleave(torch.tensor(splits))
    for i in range(4):
        weight = getattr(layer, f"weight{i}")
        torch.testing.assert_close(out[expert == i], torch.einsum("ti,oi->to", x[expert == i], weight))
        torch.testing.assert_close(weight.grad, x[expert == i].sum(0).expand(4, 6))


HYPER = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((5, 3), (7,), (0,))]


def set_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize(("decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_steps_equal_torch(decoupled, reference):
    params = parameters()
    expected = parameters()
    optimizers = FusedAdam(params, adam_w_mode=decoupled, **HYPER), reference(expected, **HYPER)
    for step in range(5):
        for optimizer in optimizers:
            (group,) = optimizer.param_groups
            group["lr"] = 3e-2 / (1 + step)
            set_gradients(group["params"], step)
            optimizer.step()
    for param, expected_param in zip(params, expected, strict=True):
        torch.testing.assert_close(param, expected_param, rtol=1e-5, atol=1e-6)
