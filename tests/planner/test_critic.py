"""The plan of PPO: what a critic takes beside the policy, against the table of models."""

from itertools import product
from typing import Any

import pytest

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.planner.activations import activation_bytes
from grpo_mp.planner.explain import explain
from grpo_mp.planner.memory import SubPhase, communicator_bytes
from grpo_mp.planner.meta_model import check_parameter_counts
from grpo_mp.planner.plan import load_use, make_plan, save_uses
from grpo_mp.planner.search import search_layouts
from grpo_mp.planner.show import ppo_models
from grpo_mp.utils.errors import UserError
from tests.planner.jobs import job_of

SEVEN_B = 7_070_619_136  # Qwen2.5-7B without its output layer
PPO: dict[str, Any] = {"algorithm": {"preset": "ppo", "kl": {"coef": 0.0}}}
LARGE: dict[str, Any] = {"layout": {"pipeline": 16, "expert": 8}, "optimizer": {"offload": "step"}}


@pytest.mark.parametrize("offload", ["none", "step", "host"])
def test_a_critic_takes_what_the_table_of_ppo_says(offload: str) -> None:
    """Its row has the activations of its passes, too, which the policy's are no less than; nothing else changes."""
    changes: dict[str, Any] = {"layout": {"tensor": 4}, "optimizer": {"offload": offload}}
    critic = {"algorithm": {"preset": "ppo", "kl": {"coef": 0.0}}, "critic": {}}
    with_critic = make_plan(job_of("qwen2.5-7b", "h100-80", 1, **changes, **critic))
    without = make_plan(job_of("qwen2.5-7b", "h100-80", 1, **changes))
    ((_, row, *_), (_, same, *_)) = ppo_models(with_critic), ppo_models(without)
    assert row == same
    (sizes,) = with_critic.memory.device
    (plain,) = without.memory.device
    kept = {kind: size for kind, size in sizes[SubPhase.TRAIN].items() if kind.startswith("critic ")}
    assert kept.keys() == {f"critic {kind}" for kind in ("weights", "gradients", "optimizer")} - (
        {"critic optimizer"} if offload == "host" else set()
    )
    activations = activation_bytes(with_critic.job, 0, 0.0)
    assert sum(kept.values()) == pytest.approx(row.device - activations)
    assert activations <= sum(sizes[SubPhase.TRAIN][kind] for kind in ("activations", "logits"))
    for sub_phase, of_phase in plain.items():
        rest = {kind: size for kind, size in sizes[sub_phase].items() if not kind.startswith("critic ")}
        assert rest | {"fragments": 0} == of_phase | {"fragments": 0}
    hosts = [size for kind, size in with_critic.memory.host[SubPhase.GENERATE].items() if kind.startswith("critic ")]
    assert sum(hosts) == pytest.approx(row.host)


def test_a_critic_takes_the_time_of_a_model_without_a_head() -> None:
    changes: dict[str, Any] = {"algorithm": {"preset": "ppo", "kl": {"coef": 0.0}}, "critic": {}}
    with_critic = make_plan(job_of("qwen2.5-7b", "h100-80", 1, **changes)).times
    without = make_plan(job_of("qwen2.5-7b", "h100-80", 1)).times
    assert without[SubPhase.LOGPROB].expected_s == 0  # one update a step
    assert 1.85 < with_critic[SubPhase.TRAIN].expected_s / without[SubPhase.TRAIN].expected_s < 2
    passes = with_critic[SubPhase.TRAIN].expected_s - without[SubPhase.TRAIN].expected_s
    assert with_critic[SubPhase.LOGPROB].expected_s == pytest.approx(passes / 3, rel=0.05)
    assert with_critic[SubPhase.OPTIMIZER].expected_s > 1.8 * without[SubPhase.OPTIMIZER].expected_s


def large(**critic: Any) -> Any:
    """A policy of 671 billion parameters over 128 GPUs in 16 stages, and a critic of 7 billion."""
    stages = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 2}
    training = {"training": {"megatron_args": stages}}
    section = {"critic": {"path": "Qwen2.5-7B"} | critic} if critic else {}
    return job_of("deepseek-r1", "h100-80", 16, **LARGE, **training, **(PPO | section if critic else {}))


def test_a_critic_of_its_own_size_and_layout_takes_what_it_holds_there() -> None:
    """In bfloat16, over two tensor ranks of one stage; each keeps the state of one part of 64."""
    job = large(layout={"tensor": 2})
    plan, without = make_plan(job), make_plan(large())
    for stage in (0, 7, 15):
        sizes = plan.memory.device[stage][SubPhase.TRAIN]
        kept = {kind: size for kind, size in sizes.items() if kind.startswith("critic ")}
        norms = 0.001  # which both tensor ranks have
        assert kept["critic weights"] == pytest.approx(SEVEN_B / 2 * 2, rel=norms)
        assert kept["critic gradients"] == pytest.approx(SEVEN_B / 2 * 4, rel=norms)
        assert kept["critic optimizer"] == pytest.approx(SEVEN_B / 2 / 64 * 12, rel=norms)
        assert job.trained_share(stage) - large().trained_share(stage) == pytest.approx(SEVEN_B / 2 / 64, rel=norms)
    # Data, tensor and the whole: the groups of a dense model in this layout.
    one = communicator_bytes(job_of("qwen2.5-7b", "h100-80", 1))[0] / 3
    assert communicator_bytes(job)[0] - communicator_bytes(large())[0] == pytest.approx(3 * one)
    assert job.trained_parameters - large().trained_parameters == pytest.approx(SEVEN_B, rel=0.001)
    checkpoints = [sum(use.disk_bytes for use in save_uses(one)) for one in (job, large())]
    assert checkpoints[0] - checkpoints[1] == pytest.approx(SEVEN_B * (2 * 14) / 16, rel=0.001)
    read = [load_use(one, 0).host_link_bytes for one in (job, large())]
    assert read[0] - read[1] == pytest.approx(SEVEN_B / 2 * 2, rel=0.001)
    flops = [one.uses[SubPhase.TRAIN].flops for one in (plan, without)]
    tokens = job.settings.samples_per_step * job.mean_seq_len
    assert (flops[0] - flops[1]) * 128 == pytest.approx(6 * SEVEN_B * tokens, rel=0.15)  # attention and padding beside
    busy = [one.times[SubPhase.TRAIN].expected_s for one in (plan, without)]
    assert busy[1] * 1.05 < busy[0] < busy[1] * 1.5
    assert "critic: 7,07" in explain(job)


@pytest.mark.parametrize(("policy", "critic"), list(product((1, 2, 4, 8), repeat=2)))
def test_the_critic_s_stages_beside_a_stage_are_those_of_its_ranks(policy: int, critic: int) -> None:
    layout, own = LayoutConfig(pipeline=policy), LayoutConfig(pipeline=critic)
    section = {"layout": {"pipeline": critic}}
    job = job_of("llama-3.2-1b", "h100-80", 1, layout={"pipeline": policy}, **PPO, critic=section)
    for stage in range(policy):
        ranks = [rank for rank in range(8) if coordinates(rank, layout, 8).pipeline == stage]
        expected = {coordinates(rank, own, 8).pipeline for rank in ranks}
        assert set(job.critic_stages(stage)) == expected
        assert job.critic_count(stage).total == max(job.critic_counts[one].total for one in expected)


def test_passes_of_a_critic_count_where_they_hold_more_than_the_policy_s() -> None:
    divided: dict[str, Any] = {"layout": {"tensor": 4}}
    alike = make_plan(job_of("qwen2.5-7b", "h100-80", 1, **divided, **PPO, critic={})).memory.device[0]
    plan = make_plan(job_of("qwen2.5-7b", "h100-80", 1, **divided, **PPO, critic={"layout": {"tensor": 1}}))
    for sub_phase in (SubPhase.LOGPROB, SubPhase.TRAIN):
        assert "critic activations" not in alike[sub_phase]
        assert plan.memory.device[0][sub_phase]["critic activations"] > 0
    sizes = plan.memory.device[0][SubPhase.TRAIN]
    passes = sum(sizes[kind] for kind in ("activations", "logits", "critic activations"))
    assert passes == pytest.approx(activation_bytes(plan.job.critic, 0, 0.0))


def test_a_critic_of_another_family_is_counted_as_megatron_builds_it() -> None:
    critic = {"path": "Qwen2.5-1.5B", "layout": {"tensor": 2, "pipeline": 2}}
    check_parameter_counts(job_of("qwen3-30b-a3b", "h100-80", 1, layout={"expert": 8}, **PPO, critic=critic))


def test_a_layout_that_does_not_fit_the_critic_is_refused_in_a_plan() -> None:
    with pytest.raises(
        UserError, match=r"^critic.layout: expert and expert_tensor must be 1: the model has no experts"
    ):
        job_of("qwen3-30b-a3b", "h100-80", 1, layout={"expert": 8}, **PPO, critic={"path": "Qwen2.5-7B"})


def test_a_critic_that_is_not_there_is_refused_in_a_plan() -> None:
    with pytest.raises(
        UserError, match=r"^critic.path=no-such is not on this machine, .*: give a folder with its conf"
    ):
        job_of("qwen2.5-7b", "h100-80", 1, **PPO, critic={"path": "no-such"})


def test_a_search_keeps_the_critic_s_layout() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 1, **PPO, critic={"path": "Qwen2.5-1.5B", "layout": {"tensor": 2}})
    best = search_layouts(job, count=2).best
    assert best
    assert {(plan.job.critic.settings.layout.tensor, plan.job.critic.model.hidden_size) for plan in best} == {(2, 1536)}
