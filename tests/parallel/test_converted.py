"""Converted weights in every kind of layout, and checkpoints of every kind of layout converted back."""

import pytest

from tests.parallel.cases import Case, cases_with
from tests.parallel.conftest import Outcomes


@pytest.mark.parametrize("case", cases_with("converted"), ids=lambda case: case.name)
def test_weights_are_those_of_the_hugging_face_folder(case: Case, outcomes: Outcomes) -> None:
    for rank in outcomes.by_rank(case, "converted"):
        assert rank["wrong"] == []
        assert rank["count"] > 10
