"""Group-limited routing against transformers' and Megatron's routers; the head sizes of latent attention."""

from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from torch import Tensor
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

from grpo_mp.policy.deepseek import GroupLimitedTopk, LatentAttention
from grpo_mp.policy.forward import sequence_logits
from grpo_mp.policy.load_models import policy_tensors
from tools.tiny.models import make_tiny, make_tokenizer

# As in DeepSeek-V2, with fewer experts
TOKENS = 200
EXPERTS = 40
GROUPS = 8
GROUP_TOPK = 3
TOPK = 6


def routed(best: int, scores: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = GroupLimitedTopk(best).get_replay_topk(scores, TOPK, GROUPS, GROUP_TOPK, group_limited_topk)
    order = experts.argsort(1)
    return values.gather(1, order), experts.gather(1, order)


@pytest.fixture
def scores() -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0)).softmax(1)


def test_ranking_by_best_two_equals_megatron(scores: Tensor) -> None:
    values, experts = group_limited_topk(scores, TOPK, TOKENS, EXPERTS, GROUPS, GROUP_TOPK)
    order = experts.argsort(1)
    assert torch.equal(routed(2, scores)[1], experts.gather(1, order))
    assert torch.equal(routed(2, scores)[0], values.gather(1, order))


def test_ranking_by_best_one_equals_deepseek_v2(scores: Tensor) -> None:
    config = DeepseekV2Config(
        hidden_size=EXPERTS,
        num_attention_heads=1,
        n_routed_experts=EXPERTS,
        n_group=GROUPS,
        topk_group=GROUP_TOPK,
        num_experts_per_tok=TOPK,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.0,
    )
    router = DeepseekV2TopkRouter(config)
    router.weight.data = torch.eye(EXPERTS)
    _, weights, experts = router(scores.log())
    order = experts.argsort(1)
    assert torch.equal(routed(1, scores)[1], experts.gather(1, order))
    torch.testing.assert_close(routed(1, scores)[0], weights.gather(1, order))
    assert not torch.equal(routed(1, scores)[1], routed(2, scores)[1])


def test_values_reach_the_attention_kernel_at_their_own_head_size(tmp_path: Path) -> None:
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    make_tiny(tmp_path, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=2, **heads)
    sizes = []
    with policy_tensors(tmp_path) as (model, _):
        layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
        for layer in layers:
            layer.core_attention.register_forward_pre_hook(
                lambda _, inputs: sizes.append([tensor.shape[-1] for tensor in inputs[:3]])
            )
        sequence_logits(model, torch.arange(5, 25))
    assert sizes == [[24, 24, 16]] * 2
