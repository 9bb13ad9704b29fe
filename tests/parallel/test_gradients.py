"""The gradient of one GRPO update: of one rank against transformers, of every other layout against one rank."""

import pytest

from tests.parallel.cases import CASES, COMPARED, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import exceeding, relative_errors

BOUND = 1e-5


@pytest.mark.parametrize("case", [CASES[f"{model}-one"] for model in COMPARED], ids=lambda case: case.name)
def test_one_rank_against_the_formula_in_transformers(case: Case, outcomes: Outcomes) -> None:
    errors = relative_errors(outcomes.gradient(case), outcomes.models[case.model].expected.gradient)
    assert not exceeding(errors, BOUND)


@pytest.mark.parametrize("case", cases_with("gradient"), ids=lambda case: case.name)
def test_every_layout_and_microbatch_against_one_rank(case: Case, outcomes: Outcomes) -> None:
    one = CASES[f"{case.model}-one"]
    assert not exceeding(relative_errors(outcomes.gradient(case), outcomes.gradient(one)), BOUND)


@pytest.mark.parametrize("case", cases_with("gradient"), ids=lambda case: case.name)
def test_the_losses_of_all_replicas_add_up(case: Case, outcomes: Outcomes) -> None:
    (one,) = outcomes.by_rank(CASES[f"{case.model}-one"], "gradient")
    # Every tensor rank of the last stage reports the same part of the loss.
    total = sum(rank["loss"] for rank in outcomes.by_rank(case, "gradient")) / case.sizes.get("tensor", 1)
    assert total == pytest.approx(one["loss"], rel=BOUND)


@pytest.mark.parametrize("case", cases_with("gradient"), ids=lambda case: case.name)
def test_metrics_of_every_layout_are_those_of_one_rank(case: Case, outcomes: Outcomes) -> None:
    """On every rank the same: of all replicas and context ranks, and of one of the ranks that compute the same."""
    (one,) = outcomes.by_rank(CASES[f"{case.model}-one"], "gradient")
    for rank in outcomes.by_rank(case, "gradient"):
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", cases_with("gradient"), ids=lambda case: case.name)
def test_the_load_of_experts_is_that_of_one_rank_but_for_padding(case: Case, outcomes: Outcomes) -> None:
    (one,) = outcomes.by_rank(CASES[f"{case.model}-one"], "gradient")
    if one["load"] is not None:
        assert len({*one["load"].sum(1).tolist()} - {0.0}) == 1  # every layer with experts routes all tokens once
    for rank in outcomes.by_rank(case, "gradient"):
        if one["load"] is None:
            assert rank["load"] is None
            continue
        more = rank["load"] - one["load"]
        assert (rank["load"].sum(1) > 0).tolist() == (one["load"].sum(1) > 0).tolist()
        if case.training.get("share_prompts"):
            fewer = more.sum(1)[one["load"].sum(1) > 0]  # the prompts of all samples but the first, in every layer
            assert fewer.max() == fewer.min()
            assert fewer.max() < 0 or case.sizes  # what a layout pads may be more
        elif case.sizes.keys() <= {"expert"}:
            assert not more.any()  # nothing is padded
        else:
            # A token near a tie of two experts may go to the other: that moves one, and padding only adds.
            assert (more >= -2).all()
