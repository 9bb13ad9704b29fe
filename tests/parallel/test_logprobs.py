"""Logits, logprobs, entropies and scores of the policy against transformers, in every layout."""

import pytest
import torch

from tests.parallel.cases import Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.expected import rows

BOUND = 2e-6  # of the largest logit: float32 rounding of either side


@pytest.mark.parametrize("case", cases_with("logits"), ids=lambda case: case.name)
def test_logits(case: Case, outcomes: Outcomes) -> None:
    reference = outcomes.models[case.model].expected
    seen = set()
    for rank in outcomes.by_rank(case, "logits"):
        where = (rank["sample"], rank["position"])
        actual = rank["logits"]
        start = rank["tensor"] * actual.shape[1]
        expected = rows(reference.logits, *where)[:, start : start + actual.shape[1]]
        # What goes beyond the vocabulary is its padding.
        assert (actual[:, : expected.shape[1]] - expected).abs().max() <= BOUND * reference.scale
        seen |= {(start, *at) for at in torch.stack(where, 1).tolist()}
    tokens = sum(len(reference.given.sequence(i)) for i in reference.given.first_update)
    assert len(seen) == tokens * case.sizes.get("tensor", 1)


@pytest.mark.parametrize("case", cases_with("logprobs"), ids=lambda case: case.name)
def test_logprobs_and_entropies(case: Case, outcomes: Outcomes) -> None:
    reference = outcomes.models[case.model].expected
    seen = set()
    for rank in outcomes.by_rank(case, "logprobs"):
        if not rank:
            continue  # only the last pipeline stage knows
        where = (rank["sample"], rank["position"])
        expected = rows(reference.distributions, *where)
        logprobs = expected.gather(1, reference.target(*where)[:, None])[:, 0]
        entropies = -(expected.exp() * expected).sum(1)
        assert (rank["logprob"] - logprobs).abs().max() <= BOUND * reference.scale
        assert (rank["entropy"] - entropies).abs().max() <= BOUND * reference.scale
        seen |= set(map(tuple, torch.stack(where, 1).tolist()))
    assert len(seen) == sum(len(reference.given.samples[i].tokens) for i in reference.given.first_update)


@pytest.mark.parametrize("case", cases_with("scores"), ids=lambda case: case.name)
def test_scores_are_known_to_every_rank(case: Case, outcomes: Outcomes) -> None:
    reference = outcomes.models[case.model].expected
    expected = [reference.scores(i) for i in reference.given.first_update]
    for rank in outcomes.by_rank(case, "scores"):
        assert [len(scores) for scores in rank["scores"]] == [len(scores) for scores in expected]
        actual = torch.tensor([score for scores in rank["scores"] for score in scores])
        assert (actual - torch.cat(expected)).abs().max() <= BOUND * reference.scale
