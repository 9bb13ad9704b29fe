"""Decoding a rollout: the batch over time, and what it reads, against sums by hand."""

import pytest

from grpo_mp.planner.engine_use import (
    cached_tokens,
    generation_use,
    running_sequences,
    samples_per_engine,
    simulate_rollout,
)
from grpo_mp.planner.memory import engine_memory
from grpo_mp.planner.resource_use import forward_flops_per_token
from tests.planner.jobs import job_of


def test_a_free_slot_takes_the_next_response() -> None:
    assert simulate_rollout((50,) * 6, slots=2).decode_steps == 150
    rollout = simulate_rollout(tuple(range(1, 101)), slots=10)
    assert 505 <= rollout.decode_steps <= 505 + 100
    assert max(rollout.batches) == 10


def test_cache_is_read_once_per_token_and_step() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 1)
    engine = engine_memory(job)
    lengths = job.responses(samples_per_engine(job))
    decode_steps = simulate_rollout(lengths, int(running_sequences(job, engine))).decode_steps
    cache = sum(sum(512 + step for step in range(length)) for length in lengths) * engine.bytes_per_token
    assert generation_use(job, engine).device_bytes == pytest.approx(decode_steps * engine.weights + cache, rel=1e-3)


def test_a_window_is_read_and_computed_where_a_query_reaches() -> None:
    """GPT-OSS: 12 of 24 layers have a window of 128 tokens; 8 key and value heads of 64, and 64 of queries."""
    job = job_of("gpt-oss-20b", "h100-80", 1, engine={"gpus_per_engine": 2})
    engine = engine_memory(job)
    prompt = 512
    lengths = job.responses(samples_per_engine(job))
    decode_steps = simulate_rollout(lengths, int(running_sequences(job, engine))).decode_steps
    contexts = [prompt + step for length in lengths for step in range(length)]
    read = sum(12 * context + 12 * min(context, 128) for context in contexts) * 2 * 4 * 64 * 2
    assert generation_use(job, engine).device_bytes == pytest.approx(decode_steps * engine.weights + read, rel=1e-3)
    for length in (100, 1000):
        keys = sum(12 * (i + 1) + 12 * min(i + 1, 128) for i in range(length)) / length
        attention = forward_flops_per_token(job.model, job.hf, length) - forward_flops_per_token(job.model, job.hf, 0)
        assert attention == pytest.approx(2 * keys * 64 * (64 + 64), rel=0.02)


@pytest.mark.parametrize("prompt", [10, 100, 500])
def test_tokens_read_from_a_window(prompt: int) -> None:
    exact = sum(min(prompt + step, 128) for step in range(300))
    assert cached_tokens(prompt, 300, 128) == pytest.approx(exact, rel=0.01)
    assert cached_tokens(prompt, 300) == pytest.approx(sum(prompt + step for step in range(300)), rel=0.01)
