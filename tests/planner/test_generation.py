"""Decoding a rollout: the batch over time, and what it reads, against sums by hand."""

import pytest

from grpo_mp.planner.generation import generation_use, plan_generation, simulate_rollout
from grpo_mp.planner.memory import engine_memory
from tests.planner.jobs import job_of


def test_a_free_slot_takes_the_next_response() -> None:
    assert simulate_rollout((50,) * 6, slots=2).decode_steps == 150
    rollout = simulate_rollout(tuple(range(1, 101)), slots=10)
    assert 505 <= rollout.decode_steps <= 505 + 100
    assert max(rollout.batches) == 10


def test_cache_is_read_once_per_token_and_step() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 1)
    engine = engine_memory(job)
    plan = plan_generation(job, engine)
    lengths = job.responses(plan.samples)
    cache = sum(sum(512 + step for step in range(length)) for length in lengths) * engine.bytes_per_token
    assert generation_use(job, engine).device_bytes == pytest.approx(
        plan.decode_steps * engine.weights + cache, rel=1e-3
    )


def test_attention_that_multiplies_longer_than_it_reads_takes_that_long() -> None:
    """128 heads on a GPU use each element of a latent cache 128 times: a smaller cache is read no faster."""

    def device_bytes(replicas: int, dtype: str) -> float:
        args = {"attn_dp_size": replicas, "kv_cache_dtype": dtype, "ep_size": 16, "moe_a2a_backend": "deepep"}
        job = job_of("deepseek-r1", "h200-141", 2, engine={"gpus_per_engine": 16, "args": args})
        return generation_use(job, engine_memory(job)).device_bytes

    assert device_bytes(16, "fp8_e4m3") == device_bytes(16, "bfloat16")
    assert device_bytes(2, "fp8_e4m3") < device_bytes(2, "bfloat16")
