"""Two published recipes for DeepSeek-R1: this planner's bytes against those that their authors state.

Both keep more than this trainer does. What they keep is stated here as the planner's `BytesPerParameter`: it describes
their trainers, not settings of this one.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mp.config import load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import BytesPerParameter, make_job
from grpo_mp.planner.memory import SubPhase, total_bytes
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import Plan, check_fits, make_plan
from grpo_mp.utils.phases import GIB
from tests.planner.jobs import job_of

TB = 1e12
# Adam on the host: float32 main weights and moments, and pinned gradients. Beside it two copies of the policy, of which
# one has its gradients, and the reference.
SLIME = BytesPerParameter(weights=2, gradients=4, optimizer=0, host_optimizer=12 + 4, host_copies=2 + (2 + 4) + 2)
# The same Adam; one pinned copy of the policy, and the reference: its offload_megatron_model_to_cpu frees gradients.
VERL = BytesPerParameter(weights=2, gradients=4, optimizer=0, host_optimizer=12 + 4, host_copies=2 + 2)
REPLICATED_MLP = {
    "moe_a2a_backend": "deepep",
    "moe_dense_tp_size": 1,
}  # dense and shared MLPs, which FP8 blocks do not divide
ENGINE = {"gpus_per_engine": 64, "args": {"quantization": "fp8", "ep_size": 64, "attn_dp_size": 8, **REPLICATED_MLP}}
ROLLOUT = {"max_prompt_tokens": 2048, "max_response_tokens": 32768}


def training(last_stage_layers: int, max_tokens: int) -> dict[str, object]:
    return {
        "updates_per_step": 4,
        "max_tokens_per_microbatch": max_tokens,
        "recompute": "full",
        "megatron_args": {"num_layers_in_last_pipeline_stage": last_stage_layers},
    }


def test_slime_on_128_gpus_of_80_gb() -> None:
    """TP8 PP4 CP4 EP32 on 16 x 8 H100; 1.4 to 1.5 TB of host memory on a node."""
    layout = {"tensor": 8, "pipeline": 4, "context": 4, "expert": 32}
    job = job_of(
        "deepseek-r1", "h100-80", 16, layout=layout, engine=ENGINE, rollout=ROLLOUT, training=training(13, 16384)
    )
    plan = make_plan(replace(job, per_parameter=SLIME))
    assert total_bytes(plan.memory.host[SubPhase.TRAIN]) == pytest.approx(1.45 * TB, rel=0.15)
    assert check_fits(plan).device.headroom > 0


def test_verl_on_96_gpus_of_96_gb() -> None:
    """TP8 PP12 EP8 on 12 x 8 H20; 66 GB on a device and 1.5 TB of host memory on a node, as measured."""
    layout = {"tensor": 8, "pipeline": 12, "expert": 8}
    engine = {"gpus_per_engine": 32, "args": {"mem_fraction_static": 0.6, "ep_size": 32, **REPLICATED_MLP}}
    rollout = {"prompts_per_step": 96, "max_prompt_tokens": 2048, "max_response_tokens": 8192}
    job = job_of(
        "deepseek-r1", "h20-96", 12, layout=layout, engine=engine, rollout=rollout, training=training(6, 10240)
    )
    plan = make_plan(replace(job, per_parameter=VERL))
    device = max(total_bytes(items[SubPhase.TRAIN]) for items in plan.memory.device)
    assert device == pytest.approx(66e9, rel=0.15)
    assert total_bytes(plan.memory.host[SubPhase.TRAIN]) == pytest.approx(1.5 * TB, rel=0.15)


CONFIGS = Path(__file__).parents[2] / "configs"


def plan_recipe(name: str, nodes: int, *overrides: str) -> Plan:
    settings = load_settings(CONFIGS / f"{name}.yaml", list(overrides))
    hf, _ = find_config(settings.model.path)
    plan = make_plan(make_job(settings, hf, read_cluster("h100-80"), nodes))
    assert check_fits(plan).fits
    return plan


def test_long_answers_on_128_gpus() -> None:
    """A step under 1,100 s needs the FP8 cache, which the recipe leaves to the user.

    A sync under 3 s: engines that fall asleep and wake, new weights, an empty cache and the check included.
    """
    plan = plan_recipe("moe_671b", 16, "engine.args.kv_cache_dtype=fp8_e4m3", "engine.args.attn_dp_size=32")
    assert plan.step_s < 1100
    assert 1100 < plan_recipe("moe_671b", 16).step_s < 1200
    host = {sub_phase: total_bytes(plan.memory.host[sub_phase]) for sub_phase in (SubPhase.OFFLOAD, SubPhase.SAVE)}
    assert host[SubPhase.SAVE] - host[SubPhase.OFFLOAD] < 100 * GIB
    sleep_s = plan.times[SubPhase.OFFLOAD]["latency"]
    assert sleep_s > 0
    assert plan.sides_s[2] + sleep_s < 3


def test_short_answers_on_256_gpus() -> None:
    """512 answers of 700 tokens, the setting of the best published figure, 134 s."""
    batch = ("rollout.prompts_per_step=32", "rollout.group_size=16", "training.updates_per_step=1")
    assert plan_recipe("deepseek_r1_512x_h100", 32, *batch, "rollout.max_response_tokens=1400").step_s < 60
