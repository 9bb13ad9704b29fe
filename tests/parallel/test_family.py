"""The gradient of one update by every preset, and by parts that no preset has: every layout against one rank."""

import pytest

from tests.parallel.cases import CASES, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import exceeding, relative_errors
from tests.parallel.inputs import FAMILY

BOUND = 1e-5
ONE = CASES["shallow-one-family"]


@pytest.mark.parametrize("algorithm", FAMILY)
@pytest.mark.parametrize("case", cases_with("family"), ids=lambda case: case.name)
def test_every_layout_and_microbatch_against_one_rank(case: Case, algorithm: str, outcomes: Outcomes) -> None:
    one = outcomes.family_gradient(CASES[case.needs[0]], algorithm)
    assert any(float(tensor.abs().max()) > 0 for tensor in one.values())
    assert not exceeding(relative_errors(outcomes.family_gradient(case, algorithm), one), BOUND)


@pytest.mark.parametrize("case", [ONE], ids=["one"])
def test_the_algorithms_differ(case: Case, outcomes: Outcomes) -> None:
    """Where two had one gradient, a part would not act; gspo's token variant is gspo for outcome rewards."""
    gradients = {name: outcomes.family_gradient(case, name) for name in FAMILY}
    norms = {name: sum(float(part.double().norm()) for part in tensors.values()) for name, tensors in gradients.items()}
    same = {frozenset(pair) for pair in ((a, b) for a in norms for b in norms if a != b and norms[a] == norms[b])}
    assert same <= {frozenset({"gspo", "gspo_token"})}
