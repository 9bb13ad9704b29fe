"""Float16 with loss scaling: every layout against one rank, a resumed run against an undisturbed one."""

import pytest

from tests.parallel.cases import CASES, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import Tensors, difference, exceeding, relative_errors
from tests.parallel.inputs import SAVED_AFTER, UPDATES

SCALE = 65536.0
NORM_BOUND = 5e-3
CHANGE_BOUND = 0.03  # of the change of the weights; those of norms are rounded to multiples of 1/1024, most of a change
every_case = pytest.mark.parametrize("case", cases_with("half"), ids=lambda case: case.name)
every_load = pytest.mark.parametrize("case", cases_with("half_resumed"), ids=lambda case: case.name)


def wrong_changes(actual: Tensors, expected: Tensors) -> dict[str, float]:
    errors = relative_errors(actual, expected)
    return exceeding({kind: error for kind, error in errors.items() if "norm" not in kind}, CHANGE_BOUND)


@every_case
def test_an_overflow_of_one_expert_on_one_rank_skips_the_update_on_all(case: Case, outcomes: Outcomes) -> None:
    """Dense parameters, which saw no overflow, divide by the same scale as experts after it."""
    start = outcomes.models[case.model].tensors
    after = outcomes.weights(case, "half", 0)
    assert [name for name in start if not start[name].half().equal(after[name])] == []
    for rank in outcomes.by_rank(case, "half"):
        assert rank["overflowed"] == [True] + [False] * UPDATES
        assert rank["scales"] == [SCALE] + [SCALE / 2] * UPDATES


@every_case
def test_weights_change_as_on_one_rank(case: Case, outcomes: Outcomes) -> None:
    one = CASES[f"{case.model}-one-half"]
    own, expected = (outcomes.weights(each, "half", UPDATES) for each in (case, one))
    start = outcomes.weights(case, "half", 0)
    assert not wrong_changes(difference(own, start), difference(expected, start))
    (alone,) = outcomes.by_rank(one, "half")
    for rank in outcomes.by_rank(case, "half"):
        assert rank["grad_norms"] == pytest.approx(alone["grad_norms"], rel=NORM_BOUND)


@pytest.mark.parametrize(("case", "plain"), [(CASES["qwen3_moe-one-half"], CASES["qwen3_moe-one"])], ids=["one"])
def test_the_gradient_norm_is_that_of_float32(case: Case, plain: Case, outcomes: Outcomes) -> None:
    (half,) = outcomes.by_rank(case, "half")
    (expected,) = outcomes.by_rank(plain, "updates")
    assert half["grad_norms"][0] == pytest.approx(expected["grad_norms"][0], rel=NORM_BOUND)


@every_load
def test_another_layout_loads_weights_and_scale_and_goes_on(case: Case, outcomes: Outcomes) -> None:
    saver = CASES[case.loads]
    saved = outcomes.weights(saver, "half", SAVED_AFTER)
    loaded = outcomes.weights(case, "half_resumed", 0)
    assert saved.keys() == loaded.keys()
    assert [name for name in saved if not saved[name].equal(loaded[name])] == []
    after = outcomes.weights(case, "half_resumed", 1)
    undisturbed = outcomes.weights(saver, "half", UPDATES)
    assert not wrong_changes(difference(after, saved), difference(undisturbed, saved))
    assert all(rank["scales"] == [SCALE / 2] for rank in outcomes.by_rank(case, "half_resumed"))
