"""The metric dictionary: unique names, lookup, and the page that documents it."""

import pytest

from grpo_mp.monitor.metrics import TABLE, find_metric, metric_name

GROUPS = {
    "critic",
    "distill",
    "reward",
    "rollout",
    "sft",
    "train",
    "mismatch",
    "sync",
    "time",
    "speed",
    "memory",
    "eval",
}


def test_rows_are_complete_and_unique() -> None:
    assert len({metric.name for metric in TABLE}) == len(TABLE)
    assert {metric.group for metric in TABLE} == GROUPS
    assert all(metric.unit and metric.meaning for metric in TABLE)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("reward/term/answer", "reward/term/{name}"),
        ("eval/gsm8k.main-2/accuracy", "eval/{set}/accuracy"),
        ("time/generate_s", "time/{phase}_s"),
        ("time/step_s", "time/step_s"),
        ("mismatch/token_mult_prob_error", "mismatch/token_mult_prob_error"),
    ],
)
def test_find_prefers_the_plain_row(name: str, row: str) -> None:
    assert find_metric(name).name == row


@pytest.mark.parametrize("name", ["reward/maen", "eval/a/b/accuracy", "eval//accuracy", "loss", "reward/term/"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not in"):
        find_metric(name)


def test_wrong_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="is a histogram, not a scalar"):
        find_metric("reward/values", "scalar")


def test_misspelling_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean reward/mean"):
        find_metric("reward/maen")


def test_fill_makes_any_text_a_legal_name() -> None:
    name = metric_name("reward/term/{name}", name="rewards/my.py:score it")
    assert name == "reward/term/rewards_my.py_score_it"
    assert find_metric(name).name == "reward/term/{name}"
