"""The table of rules: its rows name what exists; conditions against values written out."""

import json
import math
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import pytest

from grpo_mp.config import Settings, SftSettings
from grpo_mp.monitor.metrics import TABLE, find_metric
from grpo_mp.monitor.rules import RULES, Condition, Rule, RuleWatch, find_warnings
from tests.bench.sicknesses import HEALTHY, SICKNESSES

NAN = math.nan
INF = math.inf
SICK = Path(__file__).with_name("sick")


def lines(name: str, values: list[float | None]) -> list[dict[str, float | None]]:
    return [{"step": step, name: value} for step, value in enumerate(values, 1)]


def setting_exists(name: str) -> bool:
    section: Any = SftSettings if name.startswith("sft.") else Settings
    for part in name.split("."):
        found = section.model_fields.get(part) if hasattr(section, "model_fields") else None
        if found is None:
            return False
        section = next(
            (one for one in (found.annotation, *get_args(found.annotation)) if hasattr(one, "model_fields")), 0
        )
    return True


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_row_names_what_exists(rule: Rule) -> None:
    for metric in (*rule.when, *rule.but, *rule.unless):
        described = [one for one in TABLE if fnmatchcase(one.name, metric)]
        assert described or find_metric(metric.replace("*", "x"), "scalar")
    assert setting_exists(rule.setting), rule.setting
    assert 1 <= rule.weight <= 100
    assert "{" not in rule.sentence.format(value=1.0, before=1.0, name="x")
    assert all(text[-1] in ".:" for text in (rule.meaning, rule.action))
    assert re.search(r"arXiv \d{4}\.\d{5}|\w#\d+", rule.source)  # a paper, or an issue of a peer


def test_names_of_rules_are_unique() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    ("condition", "values", "holds"),
    [
        ({"above": 2, "steps": 2}, [0, 3, 3], True),
        ({"above": 2, "steps": 2}, [3, 3, 2], False),
        ({"above": 2, "steps": 2}, [0, NAN, 3], True),
        ({"below": 2, "steps": 1}, [2], False),
        ({"above": 2, "steps": 3}, [0, NAN, 3], False),  # one that is no number is not above with the others
        ({"above": INF, "steps": 1}, [-INF], True),
        ({"below": 2, "steps": 2}, [3, 0, NAN, NAN, NAN], False),  # too long ago
        ({"rises_to": 2, "steps": 2, "within": 3}, [1, 1, 2, 2.1, 2.1], True),
        ({"rises_to": 2, "steps": 2, "within": 3}, [1, 1, 2, 2, 2], False),
        ({"rises_to": 2, "steps": 2, "within": 3}, [1, 1, 2, 2.1, 2.1, 2.1, 2.1], False),  # it began longer ago
        ({"falls_to": 0.5, "steps": 1, "within": 3}, [8, NAN, 3.9], True),
        ({"rises_to": 2, "steps": 2}, [INF, -INF, 1, 1, INF, 3, 3], True),
        ({"rises_to": 2, "steps": 2}, [1e308, 1e308, 1e308, 1e308], False),
        ({"rises_to": 2, "steps": 2}, [1, 1, 4, 1.5], False),  # one value alone
        ({"falls_to": 1.2, "steps": 2}, [1, 1, 1, 1.1], True),  # "is no more than 1.2 times as large"
        ({"falls_to": 0.5, "below": 1, "steps": 1}, [8, 3], False),
        ({"rises_by": 1, "steps": 1}, [-1, 0.5], True),
        ({"falls_by": 1, "steps": 1}, [0.5, -1], True),
    ],
)
def test_conditions(condition: dict[str, float], values: list[float], holds: bool) -> None:
    assert (Condition(**condition).find(values) is not None) == holds  # type: ignore[arg-type]


def test_a_finding_says_value_meaning_setting_and_source() -> None:
    fresh = {"rollout/weight_version_lag/mean": 0.0}
    factors = lines("mismatch/token_mult_prob_error", [1.0, 1.2, 1.2, 1.2, 1.2, 1.21, 1.2])
    (found,) = find_warnings(line | fresh for line in factors)
    assert (found.rule, found.first_step, found.last_step, found.steps) == ("mismatch", 6, 7, 2)
    assert found.sentence == "engine and policy differ in a token's probability by a factor of 1.202 on average"
    assert found.advice.endswith("(algorithm.rollout_correction)")
    assert "2601.14243" in found.evidence[1]
    assert found.where == "2 of the steps 6 to 7"


def test_heavier_findings_come_first() -> None:
    both = [{"step": step, "train/padding_ratio": 0.9, "train/loss": None} for step in range(1, 7)]
    assert [found.rule for found in find_warnings(both)] == ["not_finite", "padding"]


def test_a_rule_is_noted_when_it_begins_to_hold_and_once() -> None:
    watch = RuleWatch()
    high = {"reward/failures": 3.0}
    low = {"reward/failures": 0.0}
    assert [len(watch.step(values)) for values in (high, high, {}, high, low, high)] == [1, 0, 0, 0, 0, 0]


def test_rewards_that_do_not_differ_are_no_finding_where_a_teacher_teaches() -> None:
    alike = [{"step": step, "reward/zero_std_ratio": 1.0, "reward/group_std": 0.0} for step in range(1, 8)]
    assert {found.rule for found in find_warnings(alike)} == {"zero_variance", "no_signal"}
    assert find_warnings([line | {"distill/reverse_kl/mean": 0.3} for line in alike]) == ()


def test_every_metric_of_a_pattern_is_a_finding_but_the_excepted() -> None:
    steps = [
        {"step": step, "rollout/accuracy": 0.0} | {f"reward/term/{name}": 0.9 for name in ("answer", "boxed", "tags")}
        for step in range(1, 11)
    ]
    assert {found.metric for found in find_warnings(steps)} == {"reward/term/boxed", "reward/term/tags"}
    solved = [line | {"rollout/accuracy": 0.5} for line in steps]
    assert find_warnings(solved) == ()


RECORDED = {file.stem: SICKNESSES[file.stem].rule for file in sorted(SICK.glob("*.jsonl")) if file.stem != HEALTHY}
LAG = "rollout/weight_version_lag/mean"
# Metrics of runs that cannot be had in minutes on two cores: written here. Of each, what changes after twenty steps.
WRITTEN: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "engine_differs": {"mismatch/token_mult_prob_error": (1.0, 1.8), LAG: (0.0, 0.0)},
    "not_finite": {"train/loss": (0.01, None)},
    "supervised_loss_not_finite": {"sft/loss": (0.9, None)},
    "held_out_loss_rises": {"eval/chats/loss": (1.0, 1.2), "sft/loss": (0.9, 0.6)},
    "ratio_not_finite": {"train/ratio/max": (1.2, None)},
    "gradient_exploded": {"train/grad_norm": (1.0, 2e4)},
    "no_signal": {"reward/group_std": (0.3, 0.0)},
    "entropy_explosion": {"train/entropy": (0.5, 3.0)},
    "reward_parts_diverge": {"reward/term/tags": (0.2, 0.9), "rollout/accuracy": (0.5, 0.2)},
    "reward_hacking": {"eval/aime/accuracy": (0.5, 0.3), "reward/mean": (0.5, 0.9)},
    "reward_without_accuracy": {"eval/aime/accuracy": (0.5, 0.5), "reward/mean": (0.5, 0.9)},
    "reward_term_falls": {"reward/term/polite": (0.9, 0.4), "reward/mean": (0.5, 0.9)},
    "held_out_reward_falls": {"eval/chats/reward": (0.6, 0.3), "reward/mean": (0.5, 0.9)},
    "replicas_of_engine_lost": {"sync/engines": (8.0, 7.0)},
    "mismatch": {"mismatch/token_mult_prob_error": (1.01, 1.1), LAG: (0.2, 0.2)},  # FP8 engines
    "mismatch_at_sync": {"sync/check/logprob_abs_diff/mean": (0.02, 0.07), LAG: (2.0, 2.0)},
    "routing_mismatch": {"mismatch/router_diff_ratio": (0.05, 0.3)},
    "staleness": {LAG: (1.0, 12.0)},
    "stale_mismatch": {"mismatch/token_mult_prob_error": (1.02, 1.8), LAG: (2.0, 2.0)},
    "large_updates": {"train/ppo_kl": (0.01, 0.4)},
    "lost_logprobs": {"mismatch/tokens_without_rollout_logprob": (0.0, 3.0)},
    "sync_check": {"sync/check/logprob_abs_diff/mean": (0.01, 0.5)},
    "length_explosion": {"rollout/response_length/mean": (500.0, 1500.0), "rollout/truncated_ratio": (0.0, 0.2)},
    "wrong_answers_grow": {
        "rollout/response_length/incorrect": (500.0, 900.0),
        "rollout/response_length/correct": (480.0, 490.0),
    },
    "long_tail": {"time/generate_tail_share": (0.2, 0.7)},
    "idle": {"time/idle_share": (0.1, 0.6)},
    "padding": {"train/padding_ratio": (0.1, 0.6)},
    "episodes_fail": {"rollout/episodes/error": (0.1, 0.5), "rollout/episodes/truncated": (0.9, 0.5)},
}


def recorded(name: str) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (SICK / f"{name}.jsonl").read_text().splitlines()]


def test_every_sickness_of_the_bench_is_recorded() -> None:
    assert {*RECORDED} == {*SICKNESSES} - {HEALTHY}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_sickness_is_found(name: str) -> None:
    assert RECORDED[name] in {found.rule for found in find_warnings(recorded(name))}


def test_a_healthy_run_is_silent() -> None:
    assert find_warnings(recorded(HEALTHY)) == ()


@pytest.mark.parametrize("rule", WRITTEN)
def test_a_written_sickness_is_found_when_it_begins_and_not_before(rule: str) -> None:
    steps: list[dict[str, float | None]] = [
        {"step": step} | {name: values[step > 20] for name, values in WRITTEN[rule].items()} for step in range(1, 41)
    ]
    assert find_warnings(steps[:20]) == ()
    assert rule in {found.rule for found in find_warnings(steps)}


def test_what_staleness_explains_is_not_said_of_the_engine() -> None:
    stale = recorded("staleness")
    of_the_engine = {"engine_differs", "mismatch"}
    assert {"staleness", "stale_mismatch"} <= {found.rule for found in find_warnings(stale)}
    assert not of_the_engine & {found.rule for found in find_warnings(stale)}
    fresh = [line | {LAG: 0.0} for line in stale]  # the same difference, and no older weights to explain it
    assert of_the_engine <= {found.rule for found in find_warnings(fresh)}
    wrong = [line | {"sync/check/logprob_abs_diff/mean": 0.3} for line in stale]  # older weights, and the wrong ones
    assert find_warnings(wrong)[0].rule == "sync_check"


def test_accuracy_that_falls_with_the_reward_is_no_hacking() -> None:
    falling = [{"step": step, "eval/a/accuracy": (0.5, 0.3)[step > 20], "reward/mean": 0.5} for step in range(1, 41)]
    assert "reward_hacking" not in {found.rule for found in find_warnings(falling)}


def test_every_rule_has_a_run_that_it_finds() -> None:
    assert {rule.name for rule in RULES} == {*WRITTEN} | {*RECORDED.values()}
