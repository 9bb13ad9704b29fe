"""The loss of indexers: in every layout that of one rank, and no gradient of it in other weights."""

import pytest

from tests.parallel.cases import CASES, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import exceeding, relative_errors

BOUND = 1e-5
every_case = pytest.mark.parametrize("case", cases_with("indexers"), ids=lambda case: case.name)


@every_case
def test_every_layout_against_one_rank(case: Case, outcomes: Outcomes) -> None:
    one = CASES[f"{case.model}-one-indexers"]
    errors = relative_errors(outcomes.gradient(case, "indexers"), outcomes.gradient(one, "indexers"))
    assert not exceeding(errors, BOUND)
    (expected,) = outcomes.by_rank(one, "indexers")
    assert expected["metrics"]["train/indexer_loss"] > 1e-4
    for rank in outcomes.by_rank(case, "indexers"):
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


@every_case
def test_other_weights_have_the_gradient_of_the_policys_loss(case: Case, outcomes: Outcomes) -> None:
    plain = outcomes.gradient(CASES[f"{case.model}-one"])
    trained = outcomes.gradient(case, "indexers")
    indexers = {name for name in trained if ".indexer." in name}
    assert indexers
    assert trained.keys() - plain.keys() == indexers
    assert all(trained[name].abs().max() > 0 for name in indexers)
    assert not exceeding(relative_errors({name: trained[name] for name in plain}, plain), BOUND)
