"""Tensors on their way to engines and to a Hugging Face folder, out of every layout."""

import pytest

from tests.parallel.cases import Case, cases_with
from tests.parallel.conftest import Outcomes


@pytest.mark.parametrize("case", cases_with("export"), ids=lambda case: case.name)
def test_every_tensor_arrives_once_and_bit_for_bit(case: Case, outcomes: Outcomes) -> None:
    """One rank stages what all ranks of the node load, and sends are those that the planner plans."""
    everything = sorted(outcomes.models[case.model].tensors)
    ranks = outcomes.by_rank(case, "export")
    assert sorted(ranks[0]["first"]["names"]) == everything
    assert sorted(name for rank in ranks for name in rank["all"]["names"]) == everything
    for exported in (rank[targets] for rank in ranks for targets in ("first", "all")):
        assert exported["wrong"] == []
        assert exported["rounds"] > 4
        assert exported["planned"]
        assert exported["forwarded"]
    assert ranks[0]["folders"] == []


@pytest.mark.parametrize("case", cases_with("export"), ids=lambda case: case.name)
def test_a_disk_that_is_full_for_one_rank_is_one_sentence_on_all(case: Case, outcomes: Outcomes) -> None:
    """No rank waits for it; the last one's files may have 4 KiB, as the kernel enforces."""
    sentences = {rank["full disk"] for rank in outcomes.by_rank(case, "export")}
    (sentence,) = sentences
    assert f"_export_failed cannot be written (rank {case.ranks - 1}): shard-" in sentence
    assert "File too large" in sentence
