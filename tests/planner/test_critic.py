"""The plan of PPO: what a critic takes beside the policy, against the table of models."""

from typing import Any

import pytest

from grpo_mp.planner.activations import activation_bytes
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import make_plan
from tests.planner.jobs import job_of
from tests.planner.meta_model import check_parameter_counts

PPO: dict[str, Any] = {"algorithm": {"preset": "ppo", "kl": {"coef": 0.0}}}


@pytest.mark.parametrize("offload", ["none", "step", "host"])
def test_a_critic_is_counted_beside_the_policy(offload: str) -> None:
    """Its passes take no more than the policy's, so nothing else changes."""
    changes: dict[str, Any] = {"layout": {"tensor": 4}, "optimizer": {"offload": offload}}
    critic = {"algorithm": {"preset": "ppo", "kl": {"coef": 0.0}}, "critic": {}}
    with_critic = make_plan(job_of("qwen2.5-7b", "h100-80", 1, **changes, **critic))
    without = make_plan(job_of("qwen2.5-7b", "h100-80", 1, **changes))
    (sizes,) = with_critic.memory.device
    (plain,) = without.memory.device
    kept = {kind: size for kind, size in sizes[SubPhase.TRAIN].items() if kind.startswith("critic ")}
    assert kept.keys() == {f"critic {kind}" for kind in ("weights", "gradients", "optimizer")} - (
        {"critic optimizer"} if offload == "host" else set()
    )
    activations = activation_bytes(with_critic.job, 0, 0.0)
    assert activations <= sum(sizes[SubPhase.TRAIN][kind] for kind in ("activations", "logits"))
    for sub_phase, of_phase in plain.items():
        rest = {kind: size for kind, size in sizes[sub_phase].items() if not kind.startswith("critic ")}
        assert rest | {"fragments": 0} == of_phase | {"fragments": 0}


def test_a_critic_of_another_family_is_counted_as_megatron_builds_it() -> None:
    critic = {"path": "Qwen2.5-1.5B"}
    check_parameter_counts(
        job_of("qwen3-30b-a3b", "h100-80", 1, layout={"tensor": 2, "expert": 8}, **PPO, critic=critic)
    )
