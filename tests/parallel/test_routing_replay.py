"""Replayed experts: in every layout the gradient of one rank, and not a bit changed by the router's own choice."""

import pytest

from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.hf_config import HfConfig
from tests.parallel.cases import CASES, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import exceeding, relative_errors
from tests.parallel.inputs import with_choices

BOUND = 1e-5
every_case = pytest.mark.parametrize("case", cases_with("replayed"), ids=lambda case: case.name)


def one_rank(case: Case) -> Case:
    return CASES[f"{case.model}-one-replayed"]


@every_case
def test_the_gradient_of_replayed_experts_is_that_of_one_rank(case: Case, outcomes: Outcomes) -> None:
    errors = relative_errors(outcomes.gradient(case, "replayed"), outcomes.gradient(one_rank(case), "replayed"))
    assert not exceeding(errors, BOUND)


@every_case
def test_every_expert_id_is_replayed_by_one_rank(case: Case, outcomes: Outcomes) -> None:
    """So ranks hold no more than their own share."""
    model = outcomes.models[case.model]
    given = model.expected.given
    shape = model_shape(HfConfig.read(model.folder))
    samples = [with_choices(given.samples, shape)[i] for i in given.first_update]
    routed = [sample for sample in samples if sample.routed_experts is not None]
    assert 0 < len(routed) < len(samples)
    tokens = sum(len(sample.routed_experts) for sample in routed)
    if case.training.get("share_prompts"):
        prompts = {sample.group_id: len(sample.prompt_tokens) for sample in routed}
        tokens -= sum(len(sample.prompt_tokens) - 1 for sample in routed) - sum(n - 1 for n in prompts.values())
    counts = [rank["counts"] for rank in outcomes.by_rank(case, "replayed")]
    assert sum(replayed for _, replayed in counts) == tokens * shape.num_moe_layers * shape.experts_per_token
    (one,) = outcomes.by_rank(one_rank(case), "replayed")
    if not case.training.get("share_prompts"):
        assert sum(differing for differing, _ in counts) == pytest.approx(one["counts"][0], rel=1e-3)
    assert one["counts"][0] > 0.3 * one["counts"][1]


@every_case
def test_every_tensor_rank_replays_the_keys_of_its_layers(case: Case, outcomes: Outcomes) -> None:
    """Tokens with as many keys as an indexer chooses, or fewer, have none; without keys not a bit is another."""
    model = outcomes.models[case.model]
    given = model.expected.given
    shape = model_shape(HfConfig.read(model.folder))
    by_rank = outcomes.by_rank(case, "replayed")
    if shape.indexer is None:
        assert all(rank["keys"] == 0 and not rank["unlike_own_keys"] for rank in by_rank)
        return
    samples = [with_choices(given.samples, shape)[i] for i in given.first_update]
    lengths = [len(sample.routed_experts) for sample in samples if sample.routed_experts is not None]
    tokens = sum(max(0, length - shape.indexer.topk) for length in lengths)
    assert tokens > 0
    total = tokens * len(shape.indexer.layers) * shape.indexer.topk
    assert sum(rank["keys"] for rank in by_rank) == total * case.sizes.get("tensor", 1)
    assert all(len(rank["unlike_own_keys"]) > 0.5 * len(rank["shards"]) for rank in by_rank)


@every_case
def test_replaying_the_routers_own_choice_changes_no_bit(case: Case, outcomes: Outcomes) -> None:
    for rank in outcomes.by_rank(case, "replayed"):
        assert rank["changed"] == []
        assert rank["logprobs_kept"]
        differing, replayed = rank["recorded"]
        assert differing == 0
        assert replayed > 0 or not rank["counts"][1]


@every_case
def test_replay_changes_the_gradient(case: Case, outcomes: Outcomes) -> None:
    """Or the tests above would show nothing."""
    for rank in outcomes.by_rank(case, "replayed"):
        assert len(rank["unlike_plain"]) > 0.9 * len(rank["shards"])
