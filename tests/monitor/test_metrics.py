"""The metric dictionary: unique names, lookup, and the page that documents it."""

import pytest

from grpo_mp.monitor.metrics import find_metric, metric_name


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("reward/term/answer", "reward/term/{name}"),
        ("eval/gsm8k.main-2/accuracy", "eval/{set}/accuracy"),
        ("time/generate_s", "time/{phase}_s"),
    ],
)
def test_find_prefers_the_plain_row(name: str, row: str) -> None:
    assert find_metric(name).name == row


@pytest.mark.parametrize("name", ["reward/maen", "eval/a/b/accuracy", "eval//accuracy"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not in"):
        find_metric(name)


def test_wrong_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="is a histogram, not a scalar"):
        find_metric("reward/values", "scalar")


def test_fill_makes_any_text_a_legal_name() -> None:
    name = metric_name("reward/term/{name}", name="rewards/my.py:score it")
    assert name == "reward/term/rewards_my.py_score_it"
    assert find_metric(name).name == "reward/term/{name}"
