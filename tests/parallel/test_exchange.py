"""Samples from the ranks that hold them to the ranks that train on them."""

from dataclasses import fields

import pytest
import torch

from grpo_mp.utils.types import MicroBatch
from tests.parallel.cases import Case, cases_with
from tests.parallel.conftest import Outcomes

ELSEWHERE = {"advantages", "old_logprobs", "reference_logprobs", "entropy_weight"}  # not part of the samples


def same(some: MicroBatch, other: MicroBatch) -> bool:
    pairs = ((getattr(some, f.name), getattr(other, f.name)) for f in fields(some) if f.name not in ELSEWHERE)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("case", cases_with("exchange"), ids=lambda case: case.name)
def test_every_rank_trains_on_what_it_should(case: Case, outcomes: Outcomes) -> None:
    for rank in outcomes.by_rank(case, "exchange"):
        assert [len(update) for update in rank["packed"]] == [len(update) for update in rank["expected"]]
        for update, expected in zip(rank["packed"], rank["expected"], strict=True):
            assert all(same(a, b) for a, b in zip(update, expected, strict=True))
