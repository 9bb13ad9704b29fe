"""A simulated run: nothing is lost from its books, and its times are those of closed forms."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_mp.simulation import loop
from grpo_mp.simulation.engine import SimulatedEngine, SimulatedGroup
from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.scenario import Schedule
from grpo_mp.utils.errors import UserError
from tests.simulation.scenarios import RATES, long_tail, scenario_of

RUNS: list[tuple[Schedule, dict[str, Any]]] = [
    (schedule, {"max_staleness": staleness, "drop_rate": drop_rate, "engine_mtbf_s": mtbf, "engine_restart_s": 8.0})
    for schedule in Schedule
    for staleness in (0, 1, 2, 5)
    if staleness == 1 or schedule is Schedule.COLOCATED or (staleness and schedule is Schedule.ASYNC)
    for drop_rate in (0.0, 0.5, 0.96)
    for mtbf in (0.0, 40.0)
] + [
    (Schedule.COLOCATED, {"oversample_factor": 1.5, "select_by": select_by, "drop_rate": drop_rate})
    for select_by in ("launch", "finish")
    for drop_rate in (0.0, 0.3)
]
BY_FINISH: list[tuple[Schedule, dict[str, Any]]] = [
    (Schedule.ASYNC, {"select_by": "finish", "max_staleness": staleness, "drop_rate": drop_rate, "engine_mtbf_s": 40.0})
    for staleness in (0.5, 2)
    for drop_rate in (0.0, 0.3)
]


@pytest.mark.parametrize(("schedule", "changes"), RUNS + BY_FINISH)
def test_every_group_and_token_ends_once(schedule: Schedule, changes: dict[str, Any]) -> None:
    for seed in range(3):
        scenario = scenario_of(schedule, seed=seed, **changes)
        totals = simulate(scenario).after
        groups = totals.groups
        assert groups["trained"] == scenario.steps * scenario.prompts_per_step
        assert groups["launched"] == sum(groups[fate] for fate in ("trained", "dropped", "lost", "unfinished"))
        assert totals.generated == pytest.approx(sum(totals.tokens.values()), rel=1e-6)
        assert not totals.tokens["lost"] or totals.failures or scenario.oversample_factor > 1
        assert max(totals.staleness) <= scenario.max_staleness or (schedule, changes) in BY_FINISH
        assert totals.staleness.total() == scenario.steps * scenario.samples_per_step


@pytest.mark.parametrize(("schedule", "changes"), RUNS + BY_FINISH)
def test_between_the_questions_to_the_rule_the_limit_is_what_it_would_say(
    schedule: Schedule, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, compared = loop._Run._report, 0

    def report(run: loop._Run, group: SimulatedGroup) -> None:
        nonlocal compared
        was_done = run.admission.done
        take(run, group)
        asked = run._admit()
        if not was_done:
            assert (run.admission.done, run.admission.launch_limit) == (asked.done, asked.launch_limit)
            compared += 1

    monkeypatch.setattr(loop._Run, "_report", report)
    simulate(scenario_of(schedule, **changes))
    assert compared > 100


@pytest.mark.parametrize("schedule", Schedule)
def test_a_seed_decides_everything(schedule: Schedule) -> None:
    def run(seed: int) -> tuple[object, ...]:
        outcome = simulate(scenario_of(schedule, drop_rate=0.3, engine_mtbf_s=60.0, seed=seed))
        return vars(outcome.before), vars(outcome.after)

    assert run(1) == run(1)
    assert run(1) != run(2)


def generate_s(length: int, prompt: int, batch: int) -> float:
    """Sum up the decode steps of an engine that begins `batch` samples of 4 at once."""
    steps = (RATES.decode_s(batch, batch * (prompt + done + 0.5)) for done in range(length))
    return sum(steps) + batch / 4 * prompt * RATES.prefill_token_s


def test_alike_responses_colocated_take_one_phase_after_the_other() -> None:
    scenario = scenario_of(lengths=(100,))
    train_s = 32 * 110 * RATES.train_token_s + RATES.update_s + RATES.switch_s
    outcome = simulate(scenario)
    assert outcome.step_s == pytest.approx(generate_s(100, 10, 16) + train_s + RATES.sync_s, rel=1e-9)
    assert outcome.share_of_bound == pytest.approx(1, rel=1e-9)
    assert (outcome.idle_share, outcome.lost_tokens, outcome.useful_share) == (pytest.approx(0, abs=1e-12), 0, 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("rate", "steps"), [(0.001, 1000), (0.004, 250), (0.005, 200), (0.995, 10), (0.999, 2)])
def test_the_filter_drops_the_share_that_is_given(rate: float, steps: int) -> None:
    """Of the groups that have ended in the run, to within one of each hundred that it holds in part."""
    groups = simulate(scenario_of(drop_rate=rate, lengths=(4,), group_size=1, steps=steps)).after.groups
    ended = groups["trained"] + groups["dropped"]
    assert ended == groups["launched"]
    assert groups["trained"] == 8 * steps
    assert groups["dropped"] == pytest.approx(ended * rate, abs=2)


@pytest.mark.parametrize("slower", ["engines", "trainer"])
def test_alike_responses_one_step_off_take_the_slower_side(slower: str) -> None:
    rates = replace(RATES, update_s=0.5 if slower == "engines" else 9.0)
    train_s, decode_s = 32 * 110 * rates.train_token_s + rates.update_s, generate_s(100, 10, 16)
    assert (decode_s > train_s) == (slower == "engines")
    outcome = simulate(scenario_of(Schedule.ONE_STEP_OFF, lengths=(100,), rates=rates))
    assert outcome.step_s == pytest.approx(max(decode_s, train_s) + RATES.sync_s, rel=1e-9)
    assert outcome.idle_share == pytest.approx(abs(decode_s - train_s) / outcome.step_s / 2, rel=1e-6)
    assert outcome.share_of_bound == pytest.approx(1, rel=1e-9)
    assert set(outcome.staleness) == {1}


def test_versions_of_the_first_steps() -> None:
    """The first step of every schedule is of the first weights; the second trains what the same weights generated."""
    for schedule, ages in ((Schedule.COLOCATED, {0: 64}), (Schedule.ONE_STEP_OFF, {0: 32, 1: 32})):
        assert dict(simulate(scenario_of(schedule, lengths=(50,), steps=2)).after.staleness) == ages


@pytest.mark.parametrize("schedule", [Schedule.COLOCATED, Schedule.ASYNC])
def test_staleness_hides_the_tail(schedule: Schedule) -> None:
    steps = [
        simulate(scenario_of(schedule, max_staleness=staleness, slots=64, concurrent_groups=64, steps=40)).step_s
        for staleness in (1, 2, 4)
    ]
    assert steps[0] > 1.2 * steps[1] > 1.2 * steps[2]


@pytest.mark.parametrize("schedule", [Schedule.COLOCATED, Schedule.ASYNC])
def test_full_slots_are_near_the_bound(schedule: Schedule) -> None:
    """Lengths of 16 to 512 tokens, half of the groups dropped: 4 versions suffice for 90 % of the speed."""
    changes = {"drop_rate": 0.5, "concurrent_groups": 64, "steps": 60}
    assert simulate(scenario_of(schedule, max_staleness=4, **changes)).share_of_bound > 0.9
    assert simulate(scenario_of(schedule, max_staleness=1, **changes)).share_of_bound < 0.9


def test_without_staleness_engines_of_their_own_wait_for_each_update() -> None:
    changes = {"lengths": (100,), "max_staleness": 0}
    alone = simulate(scenario_of(Schedule.ASYNC, **changes))
    train_s = 32 * 110 * RATES.train_token_s + RATES.update_s
    assert alone.step_s == pytest.approx(generate_s(100, 10, 16) + train_s + RATES.sync_s)
    assert set(alone.staleness) == {0}
    half = simulate(scenario_of(Schedule.ASYNC, lengths=(100,), max_staleness=0.5)).staleness
    assert dict(half) == {0: half.total() // 2, 1: half.total() // 2}


def test_by_finish_prefers_short_answers_and_by_launch_none() -> None:
    def mean_length(select_by: str) -> float:
        outcome = simulate(scenario_of(oversample_factor=2.0, select_by=select_by, steps=64))
        return outcome.after.tokens["trained"] / outcome.after.staleness.total()

    mean = sum(long_tail()) / len(long_tail())
    assert mean_length("launch") == pytest.approx(mean, rel=0.04)
    assert mean_length("finish") < 0.9 * mean


def test_acceptance_length_divides_decode_steps() -> None:
    plain = simulate(scenario_of(lengths=(100,), prompt_tokens=0))
    twice = simulate(scenario_of(lengths=(100,), prompt_tokens=0, acceptance_length=2.0))
    assert plain.step_s - twice.step_s == pytest.approx(generate_s(100, 0, 16) / 2)


def test_engines_fail_as_often_as_told_and_come_back() -> None:
    scenario = scenario_of(engine_mtbf_s=50.0, engine_restart_s=10.0, steps=200)
    outcome = simulate(scenario)
    assert outcome.after.failures == pytest.approx(2 * outcome.after.now / (50 + 10), rel=0.25)
    assert outcome.step_s > simulate(scenario_of(steps=200)).step_s
    assert outcome.useful_share < 1


def test_an_engine_that_fails_loses_its_groups_as_wholes_up_to_their_last_pause() -> None:
    """One was paused when a sample of it had ended, and has 10 tokens more; another has begun here."""
    engine = SimulatedEngine(scenario_of())
    engine.add(group := SimulatedGroup(0, (40, 400), kept=True))
    while group.unfinished == 2:
        engine.advance(engine.next_end())
        engine.finish_next()
    (paused,) = engine.take_back(with_tokens=True)
    recorded = dict(paused.tokens)
    assert recorded == {0: 40, 1: pytest.approx(40)}
    engine.add(paused)
    engine.add(other := SimulatedGroup(1, (10, 300), kept=True))
    while other.unfinished == 2:
        engine.advance(engine.next_end())
        engine.finish_next()
    assert other.tokens == {0: 10}
    assert engine.unrecorded_tokens == pytest.approx(3 * 10)
    assert engine.take_back(with_tokens=False) == [paused, other]
    assert (paused.tokens, other.tokens, engine.unrecorded_tokens) == (recorded, {}, 0)


def test_engines_that_fail_too_often_never_finish_a_step() -> None:
    with pytest.raises(UserError, match=r"engines fail every 0\.01 s"):
        simulate(scenario_of(engine_mtbf_s=0.01, engine_restart_s=0.01))


@pytest.mark.parametrize(
    ("schedule", "changes", "words"),
    [
        (Schedule.ONE_STEP_OFF, {"max_staleness": 2}, "max_staleness is 1"),
        (Schedule.COLOCATED, {"max_staleness": 1, "oversample_factor": 1.5}, "set one of them"),
        (Schedule.COLOCATED, {"drop_rate": 1.0}, "keep some groups"),
        (Schedule.COLOCATED, {"drop_rate": 0.9999}, "would launch 10,000 groups for each .* give 0.999 or less"),
        (Schedule.COLOCATED, {"lengths": ()}, "at least one token"),
    ],
)
def test_what_no_run_can_do_is_refused(schedule: Schedule, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        scenario_of(schedule, **changes)
