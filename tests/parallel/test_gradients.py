"""The gradient of one GRPO update: of one rank against transformers, of every other layout against one rank."""

import pytest

from tests.parallel.cases import CASES, MODELS, Case, having
from tests.parallel.conftest import Outcomes
from tests.parallel.whole import above, relative_errors

BOUND = 1e-5


@pytest.mark.parametrize("case", [CASES[f"{model}-one"] for model in MODELS], ids=lambda case: case.name)
def test_one_rank_against_the_formula_in_transformers(case: Case, outcomes: Outcomes) -> None:
    errors = relative_errors(outcomes.gradient(case), outcomes.models[case.model].expected.gradient)
    assert not above(errors, BOUND)


@pytest.mark.parametrize("case", having("gradient"), ids=lambda case: case.name)
def test_every_layout_and_microbatch_against_one_rank(case: Case, outcomes: Outcomes) -> None:
    one = CASES[f"{case.model}-one"]
    assert not above(relative_errors(outcomes.gradient(case), outcomes.gradient(one)), BOUND)


@pytest.mark.parametrize("case", having("gradient"), ids=lambda case: case.name)
def test_the_losses_of_all_replicas_add_up(case: Case, outcomes: Outcomes) -> None:
    (one,) = outcomes.of(CASES[f"{case.model}-one"], "gradient")
    # Every tensor rank of the last stage reports the same part of the loss.
    total = sum(rank["loss"] for rank in outcomes.of(case, "gradient")) / case.sizes.get("tensor", 1)
    assert total == pytest.approx(one["loss"], rel=BOUND)
