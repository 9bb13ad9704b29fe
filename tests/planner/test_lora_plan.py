"""Adapters in a plan: counted as Megatron builds them; gradients, optimizer and checkpoints are of them alone."""

from typing import Any

import pytest

from grpo_mp.planner.plan import make_plan, save_uses
from grpo_mp.policy.parameter_bytes import bytes_per_parameter
from tests.planner.jobs import job_of
from tests.planner.meta_model import check_parameter_counts

MEGATRON = {"megatron_args": {"num_layers_in_last_pipeline_stage": 13}}
LAYOUT = {"tensor": 2, "pipeline": 2, "expert": 4}


def lora(**values: Any) -> dict[str, Any]:
    return {"path": "moonlight-16b-a3b", "lora": {"rank": 16, "alpha": 32.0} | values}


@pytest.mark.parametrize("values", [{}, {"target_modules": ["q_proj", "o_proj", "mlp.down_proj"], "rank": 5}])
def test_closed_form_equals_what_megatron_builds(values: dict[str, Any]) -> None:
    job = job_of("moonlight-16b-a3b", "h100-80", 2, layout=LAYOUT, training=MEGATRON, model=lora(**values))
    check_parameter_counts(job)
    assert all(
        trained.total < 0.03 * all_.total
        for trained, all_ in zip(job.policy_trained_counts, job.parameter_counts, strict=True)
    )


def test_gradients_optimizer_and_checkpoints_are_of_adapters_alone() -> None:
    options: dict[str, Any] = {"layout": LAYOUT, "training": MEGATRON}
    full = make_plan(job_of("moonlight-16b-a3b", "h100-80", 2, **options))
    adapted = make_plan(job_of("moonlight-16b-a3b", "h100-80", 2, **options, model=lora()))
    job = adapted.job
    size = bytes_per_parameter("bfloat16", {})
    for stage, (trained, held) in enumerate(zip(job.policy_trained_counts, job.parameter_counts, strict=True)):
        phase = next(phase for phase in adapted.memory.device[stage] if phase.name == "TRAIN")
        device = adapted.memory.device[stage][phase]
        assert device["weights"] == held.total * size.weights
        assert device["gradients"] == trained.total * size.gradients
        assert device["optimizer"] == job.sharded_parameters(trained) * size.optimizer
        before = full.memory.device[stage][phase].get("logits", 0)
        gradient = 163840 // 2 * 2048 * 4 if stage == 1 else 0  # of the output layer, over two tensor ranks
        assert before - device.get("logits", 0) == gradient
    (weights, _) = save_uses(job)
    (all_weights, _) = save_uses(full.job)
    assert weights.disk_bytes < 0.03 * all_weights.disk_bytes
    assert sum(adapted.times[phase].values()) < sum(full.times[phase].values())  # no gradient of the weights
