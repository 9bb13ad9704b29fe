"""FLOPs of training, in FP8 too, counted by hand from a model's published numbers; host copies of engines' graphs."""

import pytest

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import engine_memory
from grpo_mp.planner.memory import SubPhase, plan_memory
from grpo_mp.planner.resource_use import logprob_use, train_use
from grpo_mp.utils.errors import UserError
from tests.planner.jobs import job_of

# DeepSeek-R1
LAYERS = 61
HEADS = 128
KEY_WIDTH = 192
VALUE_WIDTH = 128
MOE_LAYERS = 58
HIDDEN = 7168
EXPERT_WIDTH = 2048
EXPERTS_OF_A_TOKEN = 8
LAST_STAGES = {"megatron_args": {"num_layers_in_last_pipeline_stage": 5}}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_attention_of_latent_heads_costs_more_backward_than_twice_forward(recompute: str) -> None:
    """Forward multiplies queries by keys and scores by values; backward computes scores and four gradients."""
    training = {"recompute": recompute} | LAST_STAGES
    job = job_of("deepseek-r1", "h100-80", 16, layout={"tensor": 8, "pipeline": 8}, training=training)
    forward = logprob_use(job, 1).flops
    heads = LAYERS * HEADS * job.attention_context / 2  # causal: a token sees half of its sequence on average
    tokens = job.settings.samples_per_step * job.mean_seq_len * job.packing.load_factor / job.train_ranks
    attention = 2 * heads * (KEY_WIDTH + VALUE_WIDTH) * tokens
    attention_backward = 2 * heads * (3 * KEY_WIDTH + 2 * VALUE_WIDTH) * tokens
    passes = 2 if recompute == "full" else 1
    expected = passes * forward + 2 * (forward - attention) + attention_backward
    assert train_use(job).flops == pytest.approx(expected, rel=1e-9)


def test_ranks_wait_for_the_busiest_experts() -> None:
    """Without expert parallelism there is no other rank to wait for."""
    jobs = [
        job_of(
            "deepseek-r1", "h100-80", 16, layout={"tensor": 8, "pipeline": 8, "expert": expert}, training=LAST_STAGES
        )
        for expert in (1, 8)
    ]
    alone, divided = (logprob_use(job, 1).flops for job in jobs)
    tokens = jobs[0].settings.samples_per_step * jobs[0].mean_seq_len * jobs[0].packing.load_factor
    routed = 2 * MOE_LAYERS * EXPERTS_OF_A_TOKEN * 3 * HIDDEN * EXPERT_WIDTH * tokens / jobs[0].train_ranks
    assert divided - alone == pytest.approx((OVERHEADS.expert_wait - 1) * routed, rel=1e-6)


def test_graphs_of_sleeping_engines_are_in_host_memory() -> None:
    """Half of SGLang's default batch size takes half of the bytes, on each of a node's eight GPUs."""
    job = job_of("qwen3-30b-a3b", "h100-80", 1, engine={"args": {"cuda_graph_max_bs_decode": 128}})
    assert engine_memory(job).cuda_graphs == OVERHEADS.cuda_graphs / 2
    host = plan_memory(job).host
    assert host[SubPhase.TRAIN]["CUDA graphs"] == 8 * OVERHEADS.cuda_graphs / 2
    assert not host[SubPhase.START].get("CUDA graphs")


IN_FP8 = {"training": {"fp8_format": "e4m3"}}
# Of qwen2.5-7b
QKV = 3584 * (3584 + 2 * 512)
OUT = 3584 * 3584
MLP = 3 * 3584 * 18944
LAYER = QKV + OUT + MLP


def test_products_of_linear_layers_are_in_fp8_and_others_not() -> None:
    plain = job_of("qwen2.5-7b", "h100-80", 1)
    fp8 = job_of("qwen2.5-7b", "h100-80", 1, **IN_FP8)
    before = logprob_use(plain, 1.0)
    after = logprob_use(fp8, 1.0)
    assert after.flops + after.fp8_flops == pytest.approx(before.flops, rel=0.01)  # more padding
    tokens = fp8.settings.samples_per_step * fp8.mean_seq_len * fp8.packing.load_factor / 8
    assert after.fp8_flops == pytest.approx(2 * 28 * LAYER * tokens)
    trained = train_use(fp8)
    assert trained.fp8_flops == pytest.approx(3 * after.fp8_flops)
    assert before.fp8_flops == 0


def test_a_plan_refuses_matrices_that_fp8_products_cannot_read() -> None:
    """10944 rows of GLM-4.5-Air's dense layer over 8 ranks are 16 x 85.5."""
    sizes = {"tensor": 8, "expert": 16}
    job_of("glm-4.5-air", "h100-80", 2, layout=sizes)
    with pytest.raises(UserError, match=r"^training\.fp8_format: with layout\.tensor=8 a rank holds 4096 x 1368 "):
        job_of("glm-4.5-air", "h100-80", 2, layout=sizes, **IN_FP8)
