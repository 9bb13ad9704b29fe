"""A case that breaks on one rank is shown with its error, and leaves the next case alone."""

import pytest

from tests.parallel.cases import BREAKING, Case
from tests.parallel.conftest import Outcomes


@pytest.mark.parametrize(("case", "after"), [tuple(BREAKING)], ids=["broken"])
def test_a_broken_case_is_contained(case: Case, after: Case, outcomes: Outcomes) -> None:
    first, last = outcomes.ranks(case)
    assert "broken on purpose" in last["error"]
    assert "Error" in first["error"]
    assert all("error" not in rank for rank in outcomes.ranks(after))
