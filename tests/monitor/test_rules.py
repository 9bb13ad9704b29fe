"""The table of rules: its rows name what exists; conditions against values written out."""

import math
from typing import Any, get_args

import pytest

from grpo_mp.config import Settings
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.monitor.rules import RULES, Condition, Rule, RuleWatch, find_warnings

NAN = math.nan


def lines(name: str, values: list[float | None]) -> list[dict[str, float | None]]:
    return [{"step": step, name: value} for step, value in enumerate(values, 1)]


def setting_exists(name: str) -> bool:
    section: Any = Settings
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
    for metric in rule.when:
        assert find_metric(metric.replace("*", "x"), "scalar")
    assert setting_exists(rule.setting), rule.setting
    assert 1 <= rule.weight <= 100
    assert "{" not in rule.sentence.format(value=1.0, before=1.0, name="x")
    assert all(text[-1] in ".:" for text in (rule.meaning, rule.action))
    assert rule.source


def test_names_of_rules_are_unique() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert not setting_exists("algorithm.clip.hihg")


@pytest.mark.parametrize(
    ("condition", "values", "holds"),
    [
        ({"above": 2, "steps": 2}, [0, 3, 3], True),
        ({"above": 2, "steps": 2}, [3, 3, 2], False),
        ({"above": 2, "steps": 2}, [0, NAN, 3], True),
        ({"above": 2, "steps": 2}, [3], False),
        ({"below": 2, "steps": 1}, [0], True),
        ({"below": 2, "steps": 1}, [2], False),
        ({"rises_to": 2, "steps": 2, "within": 3}, [1, 1, 2, 2.1, 2.1], True),
        ({"rises_to": 2, "steps": 2, "within": 3}, [1, 1, 2, 2, 2], False),
        ({"rises_to": 2, "steps": 2, "within": 3}, [1, 1, 2, 2.1, 2.1, 2.1, 2.1], False),  # it began longer ago
        ({"falls_to": 0.5, "steps": 1, "within": 3}, [8, 5, 3.9], True),
        ({"falls_to": 0.5, "steps": 1, "within": 3}, [8, NAN, 3.9], False),
        ({"falls_to": 0.5, "below": 1, "steps": 1}, [8, 3], False),
        ({"rises_by": 1, "steps": 1}, [-1, 0.5], True),
        ({"falls_by": 1, "steps": 1}, [0.5, -1], True),
        ({"falls_by": 2, "steps": 1}, [0.5, -1], False),
        ({"creeps": 0.1, "steps": 1, "within": 12}, [100 + step for step in range(13)], True),
        ({"creeps": 0.1, "steps": 1, "within": 12}, [100, *[120] * 12], False),  # a step, no creep
        ({"creeps": 0.1, "steps": 1, "within": 12}, [100 + step / 2 for step in range(13)], False),
        ({"creeps": 0.1, "steps": 1, "within": 12}, [100, 200], False),  # too early to say
    ],
)
def test_conditions(condition: dict[str, float], values: list[float], holds: bool) -> None:
    assert (Condition(**condition).find(values) is not None) == holds  # type: ignore[arg-type]


def test_a_finding_says_value_meaning_setting_and_source() -> None:
    (found,) = find_warnings(lines("mismatch/token_mult_prob_error", [1.0, 1.2, 1.2, 1.2, 1.2, 1.21, 1.2]))
    assert (found.rule, found.first_step, found.last_step, found.steps) == ("mismatch", 6, 7, 2)
    assert found.sentence == "engine and policy differ in a token's probability by a factor of 1.202 on average"
    assert found.setting == "algorithm.rollout_correction"
    assert "2601.14243" in found.source
    assert found.text.startswith(found.sentence)


def test_heavier_findings_come_first() -> None:
    both = [{"step": step, "train/padding_ratio": 0.9, "train/loss": None} for step in range(1, 7)]
    assert [found.rule for found in find_warnings(both)] == ["not_finite", "padding"]


def test_a_rule_is_noted_when_it_begins_to_hold_and_not_every_step() -> None:
    watch = RuleWatch()
    high, low = {"reward/failures": 3.0}, {"reward/failures": 0.0}
    assert [len(watch.step(values)) for values in (high, high, {}, high, low, high)] == [1, 0, 0, 0, 0, 1]


def test_every_metric_of_a_pattern_is_a_finding_but_the_excepted() -> None:
    steps = [
        {"step": step, "rollout/accuracy": 0.0} | {f"reward/term/{name}": 0.9 for name in ("answer", "boxed", "tags")}
        for step in range(1, 11)
    ]
    assert {found.metric for found in find_warnings(steps)} == {"reward/term/boxed", "reward/term/tags"}
    solved = [line | {"rollout/accuracy": 0.5} for line in steps]
    assert find_warnings(solved) == ()
