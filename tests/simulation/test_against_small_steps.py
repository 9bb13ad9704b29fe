"""The simulation, which jumps from event to event, against one that goes through time in small steps."""

from dataclasses import dataclass, field
from random import Random

import pytest

from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.scenario import Scenario, Schedule
from tests.simulation.scenarios import long_tail, scenario_of

TICK_S = 2e-3


@dataclass
class Sample:
    length: int
    tokens: float = 0.0
    running: bool = False


@dataclass
class Engine:
    """Its groups by number, and the tokens that it has yet to prefill."""

    groups: dict[int, list[Sample]] = field(default_factory=dict)
    prefill_s: float = 0.0

    def tick(self, scenario: Scenario) -> list[int]:
        """Fill the slots, then prefill or decode for a tick; return the groups that are complete."""
        samples = [sample for group in self.groups.values() for sample in group]
        for group in self.groups.values():
            for sample in group:
                if sample.tokens < sample.length and not sample.running and self.batch(samples) < scenario.slots:
                    first = not any(other.running or other.tokens for other in group)
                    sample.running = True
                    self.prefill_s += scenario.prompt_tokens * first * scenario.rates.prefill_token_s
        if self.prefill_s > 0:
            self.prefill_s -= TICK_S
            return []
        batch = self.batch(samples)
        if batch:
            cached = sum(scenario.prompt_tokens + sample.tokens for sample in samples if sample.running)
            tokens = TICK_S / scenario.rates.decode_s(batch, cached) * scenario.acceptance_length
            for sample in samples:
                sample.tokens += tokens * sample.running
                sample.running = sample.running and sample.tokens < sample.length
        return [
            number for number, group in self.groups.items() if all(sample.tokens >= sample.length for sample in group)
        ]

    @staticmethod
    def batch(samples: list[Sample]) -> int:
        return sum(sample.running for sample in samples)


def small_steps(scenario: Scenario) -> tuple[list[float], dict[int, int]]:
    """Return when each step was trained, and the samples by age, of a run without filter or failures."""
    lengths, random = list(scenario.lengths), Random(scenario.seed)
    dealt: list[int] = []
    while len(dealt) < scenario.steps * 3 * scenario.samples_per_step:
        random.shuffle(lengths)
        dealt += lengths
    engines, needed = [Engine() for _ in range(scenario.engines)], scenario.prompts_per_step
    begun: dict[int, int] = {}  # version by number
    finished: dict[int, int] = {}  # tokens by number
    now, step, version, busy_s, unsent, syncing = 0.0, 0, 0, 0.0, False, False
    trained, ages = list[float](), dict[int, int]()
    while len(trained) < scenario.steps:
        while not (syncing or (scenario.colocated and busy_s > 0)) and step < scenario.steps:
            engine = min(engines, key=lambda engine: len(engine.groups))
            limit = step * needed + needed + needed * (scenario.max_staleness - (step - version))
            if len(begun) >= limit or len(engine.groups) >= scenario.groups_in_flight:
                break
            first = len(begun) * scenario.group_size
            engine.groups[len(begun)] = [Sample(length) for length in dealt[first : first + scenario.group_size]]
            begun[len(begun)] = version
        now += TICK_S
        busy_s -= TICK_S
        for engine in engines if not (syncing or (scenario.colocated and busy_s > 0)) else []:
            for number in engine.tick(scenario):
                finished[number] = sum(sample.length for sample in engine.groups.pop(number))
        if busy_s > 0:
            continue
        if syncing:
            syncing, unsent, version = False, False, step
        elif step > len(trained):
            trained.append(now)
            unsent = True
        numbers = range(step * needed, (step + 1) * needed)
        ready = step < scenario.steps and all(number in finished for number in numbers)
        if unsent and (ready or scenario.schedule is not Schedule.ONE_STEP_OFF):
            syncing, busy_s = True, scenario.rates.sync_s
        elif ready:
            prompts = scenario.samples_per_step * scenario.prompt_tokens
            busy_s = scenario.train_s(sum(finished[number] for number in numbers) + prompts)
            for number in numbers:
                age = step - begun[number]
                ages[age] = ages.get(age, 0) + scenario.group_size
            step += 1
    return trained, ages


@pytest.mark.parametrize(
    ("schedule", "staleness", "slots", "concurrent_groups"),
    [
        (Schedule.COLOCATED, 0, 16, 8),
        (Schedule.COLOCATED, 0, 5, 8),
        (Schedule.COLOCATED, 0, 16, 2),
        (Schedule.ONE_STEP_OFF, 1, 16, 8),
        (Schedule.ONE_STEP_OFF, 1, 6, 3),
        (Schedule.ASYNC, 1, 16, 8),
        (Schedule.ASYNC, 2, 7, 4),
        (Schedule.ASYNC, 4, 16, 16),
    ],
)
def test_both_agree(schedule: Schedule, staleness: int, slots: int, concurrent_groups: int) -> None:
    scenario = scenario_of(
        schedule,
        lengths=long_tail(48, limit=200),
        max_staleness=staleness,
        slots=slots,
        concurrent_groups=concurrent_groups,
        acceptance_length=1.6,
        recompute_cache=False,
        steps=6,
    )
    outcome = simulate(scenario)
    trained, ages = small_steps(scenario)
    assert outcome.after.now == pytest.approx(trained[-1], rel=0.01)
    assert outcome.before.now == pytest.approx(trained[2], rel=0.02)
    assert dict(outcome.after.staleness) == ages
