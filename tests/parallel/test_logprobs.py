"""Logits, logprobs, entropies and scores of the policy against transformers, in every layout."""

import pytest
import torch

from tests.parallel.cases import Case, having
from tests.parallel.conftest import Outcomes

BOUND = 2e-6  # of the largest logit: float32 rounding of either side


def each(measure: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", having(measure), ids=lambda case: case.name)


@each("logits")
def test_logits(case: Case, outcomes: Outcomes) -> None:
    expected = outcomes.models[case.model].expected
    seen = set()
    for rank in outcomes.of(case, "logits"):
        width = rank["logits"].shape[1]
        start = rank["tensor"] * width
        for sample, position, row in zip(
            rank["sample"].tolist(), rank["position"].tolist(), rank["logits"], strict=True
        ):
            wanted = expected.logits[sample][position, start : start + width]  # without the padding of the vocabulary
            assert (row[: len(wanted)] - wanted).abs().max() <= BOUND * expected.scale
            seen.add((sample, position, start))
    tokens = sum(len(expected.given.sequence(i)) for i in expected.given.first_update)
    assert len(seen) == tokens * case.sizes.get("tensor", 1)


@each("logprobs")
def test_logprobs_and_entropies(case: Case, outcomes: Outcomes) -> None:
    expected = outcomes.models[case.model].expected
    seen = set()
    for rank in outcomes.of(case, "logprobs"):
        columns = [rank[name].tolist() for name in ("sample", "position", "logprob", "entropy")] if rank else [[]] * 4
        for sample, position, logprob, entropy in zip(*columns, strict=True):
            distribution = expected.distributions(sample)[position]
            target = expected.given.sequence(sample)[position + 1]
            assert abs(logprob - float(distribution[target])) <= BOUND * expected.scale
            assert abs(entropy + float((distribution.exp() * distribution).sum())) <= BOUND * expected.scale
            seen.add((sample, position))
    assert len(seen) == sum(len(expected.given.samples[i].tokens) for i in expected.given.first_update)


@each("scores")
def test_scores_are_known_to_every_rank(case: Case, outcomes: Outcomes) -> None:
    expected = outcomes.models[case.model].expected
    for rank in outcomes.of(case, "scores"):
        assert len(rank["scores"]) == len(expected.given.first_update)
        for sample, scores in enumerate(rank["scores"]):
            wanted = expected.scores(sample)
            assert len(scores) == len(wanted)
            assert not len(wanted) or (torch.tensor(scores) - wanted).abs().max() <= BOUND * expected.scale
