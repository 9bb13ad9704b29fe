"""Sicknesses that come over hundreds or thousands of steps are found, and noise that stays what it is, is none."""

import random
from collections.abc import Iterator

import pytest

from grpo_mp.monitor.rules import RULES, MetricLine, find_warnings

LAG = "rollout/weight_version_lag/mean"
HEALTHY_STEPS, EVALUATIONS = 60, 50  # before it begins; in the run
# From where to where each metric goes: of eval/ there is a value every 50th of the run.
RAMPS: dict[str, dict[str, tuple[float, float]]] = {
    "kl_drift": {"train/kl_loss": (0.05, 2.0)},
    "entropy_collapse": {"train/entropy": (0.4, 0.02), "rollout/accuracy": (0.3, 0.3)},
    "entropy_explosion": {"train/entropy": (0.5, 3.0)},
    "length_collapse": {"rollout/response_length/mean": (600.0, 200.0)},
    "length_explosion": {"rollout/response_length/mean": (500.0, 1500.0), "rollout/truncated_ratio": (0.02, 0.3)},
    "wrong_answers_grow": {
        "rollout/response_length/incorrect": (500.0, 1000.0),
        "rollout/response_length/correct": (480.0, 490.0),
    },
    "mismatch_grows": {"mismatch/logprob_abs_diff/mean": (0.011, 0.036), LAG: (0.0, 0.0)},
    "expert_collapse": {"train/expert_load/max_over_mean": (2.0, 7.0)},
    "host_memory_creeps": {"memory/train/host_bytes": (5e10, 7e10)},
    "reward_parts_diverge": {"reward/term/tags": (0.2, 0.9), "rollout/accuracy": (0.5, 0.2)},
    "reward_hacking": {
        "eval/aime/accuracy": (0.5, 0.25),
        "eval/aime/accuracy_se": (0.03, 0.03),
        "reward/mean": (0.5, 0.9),
    },
    "reward_without_accuracy": {
        "eval/aime/accuracy": (0.3, 0.3),
        "eval/aime/accuracy_se": (0.03, 0.03),
        "reward/mean": (0.5, 0.9),
    },
    "reward_term_falls": {"reward/term/polite": (0.9, 0.4), "reward/mean": (1.0, 1.6)},
    "reward_by_length": {"rollout/response_length/mean": (300.0, 700.0), "reward/mean": (0.5, 0.9)},
    "held_out_reward_falls": {"eval/chats/reward": (0.6, 0.3), "reward/mean": (0.5, 0.9)},
    "held_out_loss_rises": {"eval/chats/loss": (1.0, 1.6), "sft/loss": (0.9, 0.5)},
}
# No correctness is defined: these look at a reward that only judges give.
JUDGED = ("reward_term_falls", "reward_by_length", "held_out_reward_falls")


def ramp(metrics: dict[str, tuple[float, float]], steps: int, noise: float = 0.05) -> Iterator[MetricLine]:
    """Yield a run whose metrics go from one value to the other in so many steps, with noise of this share."""
    drawn, total = random.Random(0), HEALTHY_STEPS + steps
    for step in range(1, total + 1):
        part = max(0, step - HEALTHY_STEPS) / steps
        is_evaluated = step % (total // EVALUATIONS) == 0
        yield {"step": step} | {
            name: (start + part * (end - start)) * (1 + drawn.gauss(0, noise_of(name, noise)))
            for name, (start, end) in metrics.items()
            if is_evaluated or not name.startswith("eval/")
        }


def noise_of(name: str, noise: float) -> float:
    """Return the noise of a metric: memory and a standard error have less."""
    return noise / 10 if name.endswith(("_bytes", "accuracy_se")) else noise


@pytest.mark.parametrize("steps", [500, 2000, 5000])
@pytest.mark.parametrize("rule", RAMPS)
def test_a_slow_sickness_is_found(rule: str, steps: int) -> None:
    found = {one.rule: one for one in find_warnings(ramp(RAMPS[rule], steps))}
    assert rule in found
    assert found[rule].first_step > HEALTHY_STEPS


@pytest.mark.parametrize("rule", RAMPS)
def test_noise_is_no_sickness(rule: str) -> None:
    steady = {name: (start, start) for name, (start, _) in RAMPS[rule].items()}
    assert find_warnings(ramp(steady, 2000, noise=0.2)) == ()


def test_every_rule_that_looks_back_has_a_ramp() -> None:
    looking = {rule.name for rule in RULES for one in rule.when.values() if one.looks_back and one.whole_run}
    assert looking == {*RAMPS}


def test_a_leak_that_begins_late_is_found_and_a_plateau_is_not() -> None:
    late = [5e10 + max(0, step - 3000) * 5e6 for step in range(5000)]
    plateau = [5e10 + min(step, 150) * 6e7 for step in range(2000)]
    (found,) = find_warnings({"step": step, "memory/train/host_bytes": held} for step, held in enumerate(late))
    assert found.first_step > 3000
    assert find_warnings({"step": step, "memory/train/host_bytes": held} for step, held in enumerate(plateau)) == ()


def test_a_fall_from_a_peak_is_seen_that_ends_above_the_start() -> None:
    lengths = [*range(300, 2300, 2), *range(2300, 900, -1)]
    lines = [{"step": step, "rollout/response_length/mean": float(length)} for step, length in enumerate(lengths)]
    assert [found.rule for found in find_warnings(lines)] == ["length_collapse"]


def test_answers_that_all_grow_are_not_wrong_answers_that_grow() -> None:
    alike = {"rollout/response_length/incorrect": (500.0, 1200.0), "rollout/response_length/correct": (480.0, 1150.0)}
    assert find_warnings(ramp(alike, 2000)) == ()


def test_a_reward_that_rises_before_accuracy_falls_is_no_hacking() -> None:
    """The policy learns, then overfits at the same reward: what fell is said, with no word of a reward that rose."""
    lines = []
    for step in range(1, 1001):
        learned, overfitted = min(1, step / 500), max(0, step - 500) / 500
        accuracy = 0.3 + 0.3 * learned - 0.3 * overfitted
        line = {"step": step, "reward/mean": 0.5 + 0.4 * learned + 0.01 * (step % 3)}
        evaluated = {"eval/aime/accuracy": accuracy, "eval/aime/accuracy_se": 0.02}
        lines.append(line | (evaluated if step % 20 == 0 else {}))
    assert "reward_hacking" not in {found.rule for found in find_warnings(lines)}


@pytest.mark.parametrize("rule", JUDGED)
def test_what_only_judges_show_is_left_to_accuracy_where_there_is_one(rule: str) -> None:
    right = RAMPS[rule] | {"rollout/accuracy": (0.5, 0.5)}
    assert rule not in {found.rule for found in find_warnings(ramp(right, 500))}


def test_a_fall_within_twice_the_standard_error_is_no_hacking() -> None:
    """The standard error of the difference of two evaluations is 1.41 times that of one."""

    def fell_by(change: float) -> set[str]:
        metrics = {"eval/aime/accuracy": (0.5, 0.5 - change), "eval/aime/accuracy_se": (0.05, 0.05)}
        steps = ramp(metrics | {"reward/mean": (0.5, 0.9)}, 500, noise=0.0)
        return {found.rule for found in find_warnings(steps)}

    assert "reward_hacking" not in fell_by(0.13)
    assert "reward_hacking" in fell_by(0.18)
