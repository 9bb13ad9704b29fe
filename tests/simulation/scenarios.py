"""Make scenarios for tests of the simulation."""

from random import Random
from typing import Any

from grpo_mp.simulation.scenario import Rates, Scenario, Schedule

RATES = Rates(
    decode_step_s=0.02,
    train_token_s=2e-4,
    sequence_s=1e-3,
    cached_token_s=1e-6,
    experts_s=0.01,
    unused_expert=0.9,
    prefill_token_s=1e-4,
    update_s=0.5,
    sync_s=0.3,
    switch_s=0.7,
)


def long_tail(count: int = 256, seed: int = 0, limit: int = 512) -> tuple[int, ...]:
    """Lognormal lengths of 16 and more tokens."""
    random = Random(seed)
    return tuple(min(limit, max(16, round(random.lognormvariate(4, 1)))) for _ in range(count))


def scenario_of(schedule: Schedule = Schedule.COLOCATED, **changes: Any) -> Scenario:
    """Two engines and a trainer; 8 groups of 4 samples a step; as many samples at a time as a step has."""
    values: dict[str, Any] = {
        "rates": RATES,
        "lengths": long_tail(),
        "engines": 2,
        "engine_gpus": 2,
        "trainer_gpus": 2,
        "slots": 16,
        "concurrent_groups": 8,
        "prompts_per_step": 8,
        "group_size": 4,
        "prompt_tokens": 10,
        "max_staleness": 0 if schedule is Schedule.COLOCATED else 1,
    }
    return Scenario(schedule, **(values | changes))
