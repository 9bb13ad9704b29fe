"""Tensors and samples on their way in every layout: exports, converted folders, batches; and a case that breaks."""

from dataclasses import fields

import pytest
import torch

from grpo_mp.utils.types import MicroBatch
from tests.parallel.cases import BREAKING, Case, cases_with
from tests.parallel.conftest import Outcomes

ELSEWHERE = {"advantages", "old_logprobs", "reference_logprobs", "entropy_weight"}  # not part of the samples


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


@pytest.mark.parametrize("case", cases_with("full_disk"), ids=lambda case: case.name)
def test_a_disk_that_is_full_for_one_rank_is_one_sentence_on_all(case: Case, outcomes: Outcomes) -> None:
    """No rank waits for it; the last one's files may have 4 KiB, as the kernel enforces."""
    sentences = set(outcomes.by_rank(case, "full_disk"))
    (sentence,) = sentences
    assert f"_export_failed cannot be written (rank {case.ranks - 1}): shard-" in sentence
    assert "File too large" in sentence


@pytest.mark.parametrize("case", cases_with("converted"), ids=lambda case: case.name)
def test_converted_weights_are_those_of_the_hugging_face_folder(case: Case, outcomes: Outcomes) -> None:
    for rank in outcomes.by_rank(case, "converted"):
        assert rank["wrong"] == []
        assert rank["count"] > 10


def same(some: MicroBatch, other: MicroBatch) -> bool:
    pairs = ((getattr(some, f.name), getattr(other, f.name)) for f in fields(some) if f.name not in ELSEWHERE)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("case", cases_with("exchange"), ids=lambda case: case.name)
def test_every_rank_trains_on_what_it_should(case: Case, outcomes: Outcomes) -> None:
    for rank in outcomes.by_rank(case, "exchange"):
        assert [len(update) for update in rank["packed"]] == [len(update) for update in rank["expected"]]
        for update, expected in zip(rank["packed"], rank["expected"], strict=True):
            assert all(same(a, b) for a, b in zip(update, expected, strict=True))


@pytest.mark.parametrize(("case", "after"), [tuple(BREAKING)], ids=["broken"])
def test_a_broken_case_is_contained(case: Case, after: Case, outcomes: Outcomes) -> None:
    first, last = outcomes.ranks(case)
    assert "broken on purpose" in last["error"]
    assert "Error" in first["error"]
    assert all("error" not in rank for rank in outcomes.ranks(after))
