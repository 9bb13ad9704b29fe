"""Replayed routing of one Megatron router against the formula in float64, for every kind of router."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from grpo_mp.policy.deepseek import GroupLimitedTopk
from grpo_mp.policy.routing_replay import LayerReplay

TOKENS = 12
EXPERTS = 16
TOPK = 4
GROUPS = {"num_groups": 4, "group_topk": 2}
ROWS = torch.tensor([0, 2, 3, 4, 7, 11])  # those with choices


@dataclass(frozen=True)
class Kind:
    """How a family routes: arguments of Megatron's function, and the ranking of groups where it is not Megatron's."""

    arguments: dict[str, Any]
    ranking: GroupLimitedTopk | None = None

    def route(self, logits: Tensor, replay: LayerReplay | None) -> tuple[Tensor, Tensor]:
        """[T, experts] probabilities and map."""
        arguments = self.arguments | {"router_replay": replay or self.ranking}
        routed: tuple[Tensor, Tensor] = topk_routing_with_score_function(logits, TOPK, **arguments)
        return routed


BIAS = torch.linspace(-0.3, 0.3, EXPERTS)
SIGMOID: dict[str, Any] = {"score_function": "sigmoid", "scaling_factor": 2.5, "expert_bias": BIAS}
KINDS = {
    "softmax": Kind({"score_function": "softmax"}),  # Qwen3, Mixtral
    "softmax_first": Kind({"score_function": "softmax", "use_pre_softmax": True, "scaling_factor": 1.5}),
    "groups_by_best": Kind({"score_function": "softmax", "use_pre_softmax": True, **GROUPS}, GroupLimitedTopk(1)),
    "sigmoid": Kind(SIGMOID),  # GLM, Kimi
    "sigmoid_groups": Kind(SIGMOID | GROUPS),  # DeepSeek-V3
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def expected_weights(kind: Kind, logits: Tensor, experts: Tensor) -> Tensor:
    """[T, top-k] weights of given experts, by the published formulas."""
    if kind.arguments["score_function"] == "sigmoid":
        scores = logits.sigmoid().gather(1, experts)
        return 2.5 * scores / scores.sum(1, keepdim=True)
    if kind.arguments.get("use_pre_softmax"):
        return kind.arguments.get("scaling_factor", 1.0) * logits.softmax(1).gather(1, experts)
    return logits.gather(1, experts).softmax(1)


def random_logits(seed: int) -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))


def other_experts(count: int) -> Tensor:
    """[count, top-k] distinct experts at random."""
    return torch.rand(count, EXPERTS, generator=torch.Generator().manual_seed(5)).argsort(1)[:, :TOPK]


def chosen(routing_map: Tensor) -> Tensor:
    return routing_map.nonzero()[:, 1].view(len(routing_map), TOPK)


def replaying(kind: Kind, rows: Tensor, experts: Tensor) -> LayerReplay:
    return LayerReplay(0, kind.ranking, target=(rows, experts.to(torch.uint8)), is_training=True)


@every_kind
def test_weights_and_gradient_of_replayed_experts_are_those_of_the_formula(kind: Kind) -> None:
    logits = random_logits(0).requires_grad_()
    experts = other_experts(len(ROWS))
    probabilities, routing_map = kind.route(logits, replaying(kind, ROWS, experts))
    own = chosen(kind.route(logits, None)[1])
    full = own.index_copy(0, ROWS, experts).sort(1).values
    assert torch.equal(chosen(routing_map), full)
    exact = random_logits(0).double().requires_grad_()
    expected = expected_weights(kind, exact, full)
    assert (probabilities.gather(1, full) - expected).abs().max() < 1e-6
    upstream = random_logits(1)
    (probabilities * upstream).sum().backward()
    (expected * upstream.double().gather(1, full)).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert (logits.grad - exact.grad).abs().max() < 1e-6


def test_experts_that_differ_are_counted() -> None:
    kind = KINDS["sigmoid_groups"]
    own = chosen(kind.route(random_logits(0), None)[1])[ROWS]
    others = other_experts(len(ROWS))
    replay = replaying(kind, ROWS, others)
    kind.route(random_logits(0), replay)
    pairs = zip(own.tolist(), others.tolist(), strict=True)
    assert int(replay.differing) == sum(len(set(theirs) - set(ours)) for ours, theirs in pairs) > 0


def test_a_recomputed_forward_replays_what_its_first_one_did() -> None:
    """As a pipeline does: two forwards without gradients, then both again, the oldest first."""
    kind = KINDS["softmax"]
    replay = LayerReplay(0, None, is_training=True)
    targets = [(ROWS, other_experts(len(ROWS))), (ROWS, other_experts(len(ROWS)).flip(0)), None]
    first = []
    again = []
    with torch.no_grad():
        for replay.target in targets:
            first.append(kind.route(random_logits(0), replay)[1])
    counted = replay.replayed
    for _ in targets:
        again.append(kind.route(random_logits(0), replay)[1])
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert replay.replayed == counted == 2 * ROWS.numel() * TOPK
