"""Tensors on their way to engines and to a Hugging Face folder, out of every layout."""

import pytest

from tests.parallel.cases import Case, having
from tests.parallel.conftest import Outcomes


@pytest.mark.parametrize("targets", ["first", "all"])
@pytest.mark.parametrize("case", having("export"), ids=lambda case: case.name)
def test_every_tensor_arrives_once_and_bit_for_bit(case: Case, targets: str, outcomes: Outcomes) -> None:
    everything = sorted(outcomes.models[case.model].tensors)
    for number, rank in enumerate(outcomes.of(case, "export")):
        exported = rank[targets]
        assert sorted(exported["names"]) == (everything if targets == "all" or number == 0 else [])
        assert exported["wrong"] == []
        assert exported["rounds"] > 4
