"""Memory by kind against numbers computed by hand, and residency by phase."""

from pathlib import Path

import pytest

from grpo_mp.checkpoint.describe import PIECE_BYTES
from grpo_mp.config import load_settings
from grpo_mp.phases import GIB
from grpo_mp.planner.activations import layer_bytes, logits_bytes
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import BytesPerParameter, PlannedJob, bytes_per_parameter, make_job
from grpo_mp.planner.memory import SubPhase, engine_memory, plan_memory
from grpo_mp.planner.model_configs import published_config
from grpo_mp.planner.plan import check_fits, make_plan
from tests.planner.jobs import job_of

QWEN = 7_615_616_512  # parameters of Qwen2.5-7B, as its publisher's files hold
ROOT = Path(__file__).parents[2]
PRECISION_AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


def test_dense_model_on_eight_replicas() -> None:
    memory = plan_memory(job_of("qwen2.5-7b", "h100-80", 1))
    (device,) = memory.device
    train = device[SubPhase.TRAIN]
    assert train["weights"] == QWEN * 2
    assert train["gradients"] == QWEN * 4
    assert train["optimizer"] == QWEN * 12 / 8
    assert memory.host[SubPhase.GENERATE]["weights"] == QWEN * 2 * 8
    assert memory.host[SubPhase.GENERATE]["optimizer"] == QWEN * 12
    # 28 layers of 4 key and 4 value heads of 128 in bfloat16
    assert memory.engine.bytes_per_token == 28 * 2 * 4 * 128 * 2
    assert memory.engine.weights == pytest.approx(QWEN * 2, rel=1e-4)


def test_latent_cache_has_576_elements_per_token_and_layer() -> None:
    args = {"mem_fraction_static": 0.7, "attn_dp_size": 2, "quantization": "fp8"}
    memory = engine_memory(
        job_of("deepseek-r1", "h100-80", 16, engine={"gpus_per_engine": 16, "args": args | {"ep_size": 16}})
    )
    assert memory.bytes_per_token == 61 * 576 * 2
    assert memory.kv_cache_tokens == 2 * int((0.7 * 79.1 * GIB - memory.weights) / (61 * 576 * 2))
    fp8_cache = engine_memory(
        job_of(
            "deepseek-r1", "h100-80", 16, engine={"gpus_per_engine": 16, "args": args | {"kv_cache_dtype": "fp8_e4m3"}}
        )
    )
    assert fp8_cache.bytes_per_token == 61 * 576


def test_bytes_per_parameter() -> None:
    def bytes_kept(megatron: dict[str, object], dtype: str = "bfloat16") -> BytesPerParameter:
        return bytes_per_parameter(dtype, megatron)

    assert bytes_kept({}) == BytesPerParameter(2, 4, 12, host_copies=2)
    assert bytes_kept(PRECISION_AWARE).saved == 8
    assert bytes_kept(PRECISION_AWARE).optimizer == 2 + 2 + 2
    assert bytes_kept(PRECISION_AWARE | {"store_param_remainders": False}).optimizer == 4 + 2 + 2
    assert bytes_kept({"use_precision_aware_optimizer": True}).optimizer == 2 + 4 + 4
    assert bytes_kept({"grad_reduce_in_fp32": False}) == BytesPerParameter(2, 2, 12, fp32_gradients=4, host_copies=2)
    assert bytes_kept({}, "float32") == BytesPerParameter(4, 4, 8)


def test_residency_by_phase() -> None:
    (device,) = plan_memory(job_of("qwen2.5-7b", "h100-80", 1)).device
    assert {"engine weights", "KV cache"} <= device[SubPhase.GENERATE].keys()
    assert not {"weights", "gradients", "optimizer"} & device[SubPhase.GENERATE].keys()
    assert not {"engine weights", "KV cache"} & device[SubPhase.TRAIN].keys()
    assert {"weights", "engine weights", "sync rounds"} <= device[SubPhase.SYNC].keys()
    assert "KV cache" not in device[SubPhase.SYNC]


def test_float32_policy_and_engine_stay_on_the_device() -> None:
    (device,) = plan_memory(job_of("qwen2.5-7b", "h100-80", 1, model={"dtype": "float32"})).device
    assert {"weights", "optimizer", "engine weights", "KV cache"} <= device[SubPhase.TRAIN].keys()


def test_output_head_holds_logits_chunks_and_its_gradient() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 1, layout={"tensor": 4})
    rows, columns, hidden = 1024, 152064 // 4, 4096 * 3584 * 2  # of a micro-batch, gathered
    assert logits_bytes(job, 0, backward=False) == rows * columns * 10 + hidden
    assert logits_bytes(job, 0, backward=True) == rows * columns * 14 + 2 * hidden + columns * 3584 * 4


def test_watched_reference_costs_its_share_of_a_forward_pass() -> None:
    def job(**kl: float) -> PlannedJob:
        return job_of("qwen2.5-7b", "h100-80", 1, algorithm={"kl": kl})

    def reference_bytes(**kl: float) -> float:
        return plan_memory(job(**kl)).host[SubPhase.TRAIN]["reference"]

    assert (reference_bytes(), reference_bytes(monitor_share=0.1)) == (0, QWEN * 2 * 8)
    assert reference_bytes(monitor_share=0.1) == reference_bytes(coef=0.1)
    watched, full = (make_plan(job(**kl)).uses[SubPhase.LOGPROB] for kl in ({"monitor_share": 0.1}, {"coef": 0.1}))
    assert watched.flops == pytest.approx(full.flops / 10)
    assert watched.host_link_bytes == full.host_link_bytes > 0


def test_pinned_optimizer_copy_is_on_the_host_from_the_first_step_on() -> None:
    host = plan_memory(job_of("qwen2.5-7b", "h100-80", 1)).host
    optimizer = {sub_phase: host[sub_phase].get("optimizer", 0) for sub_phase in SubPhase}
    assert {sub_phase for sub_phase, size in optimizer.items() if size != QWEN * 12} == {SubPhase.START, SubPhase.LOAD}


def test_a_save_needs_the_written_weights_and_one_piece() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 1, training={"megatron_args": PRECISION_AWARE})
    memory = plan_memory(job)
    assert memory.host[SubPhase.SAVE]["checkpoint"] == QWEN * 2 + 8 * 2 * PIECE_BYTES
    assert "optimizer" not in memory.device[0][SubPhase.SAVE]
    assert job.per_parameter.saved == 8


def test_moe_671b_leaves_device_headroom() -> None:
    settings = load_settings(ROOT / "configs" / "moe_671b.yaml")
    job = make_job(settings, published_config("deepseek-r1"), read_cluster("h100-80"), 16)
    assert check_fits(make_plan(job)).device.headroom > 10 * GIB


def test_shared_prompts_expand_keys_and_values() -> None:
    separate = job_of("qwen2.5-7b", "h100-80", 1)
    shared = job_of("qwen2.5-7b", "h100-80", 1, training={"share_prompts": True})
    assert separate.mean_response_tokens == 1536
    # A micro-batch of 4096 tokens: a prompt of 1024, seen by itself and by two responses of 1536.
    keys = 1024 + 2 * (1024 + 1536)
    assert layer_bytes(shared, 0) - layer_bytes(separate, 0) == keys * 2 * 4 * 128 * 2
