"""Decoding a rollout: the batch over time, and what it reads, against sums by hand."""

import pytest

from grpo_mp.planner.engine_use import generation_use, running_sequences, samples_per_engine, simulate_rollout
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
    lengths = job.responses(samples_per_engine(job))
    decode_steps = simulate_rollout(lengths, int(running_sequences(job, engine))).decode_steps
    cache = sum(sum(512 + step for step in range(length)) for length in lengths) * engine.bytes_per_token
    assert generation_use(job, engine).device_bytes == pytest.approx(decode_steps * engine.weights + cache, rel=1e-3)
