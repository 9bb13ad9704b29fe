"""Weights after optimizer updates: every layout against one rank, a resumed run against an undisturbed one."""

import pytest
import torch

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import WORLD, communicators
from tests.parallel.cases import CASES, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import Tensors, difference, exceeding, relative_errors
from tests.parallel.inputs import SAVED_AFTER, UPDATES

NORM_BOUND = 1e-5
# Of the change of the weights, unless the weights differ by no more than float32 can tell of them.
CHANGE_BOUND = 5e-5
RESOLUTION = torch.finfo(torch.float32).eps


def updated(case: Case, outcomes: Outcomes, updates: int) -> Tensors:
    return outcomes.weights(case, "updates", updates - 1)


def wrong_changes(actual: Tensors, expected: Tensors, before: Tensors, bound: float) -> dict[str, float]:
    """The relative errors of changes of the weights since `before`, by kind of tensor, that exceed the bound."""
    changes = relative_errors(difference(actual, before), difference(expected, before))
    weights = exceeding(relative_errors(actual, expected), RESOLUTION)
    return {
        kind: error
        for kind, error in exceeding(changes, bound).items()
        if kind in weights and not kind.endswith("correction_bias")
    }


@pytest.mark.parametrize("updates", [1, UPDATES])
@pytest.mark.parametrize("case", cases_with("updates"), ids=lambda case: case.name)
def test_weights_change_as_on_one_rank(case: Case, updates: int, outcomes: Outcomes) -> None:
    start = outcomes.models[case.model].tensors
    one = updated(CASES[f"{case.model}-one"], outcomes, updates)
    assert not wrong_changes(updated(case, outcomes, updates), one, start, CHANGE_BOUND * case.rounding)


@pytest.mark.parametrize("case", cases_with("updates"), ids=lambda case: case.name)
def test_every_rank_knows_the_gradient_norm_of_one_rank(case: Case, outcomes: Outcomes) -> None:
    (one,) = outcomes.by_rank(CASES[f"{case.model}-one"], "updates")
    for rank in outcomes.by_rank(case, "updates"):
        assert rank["grad_norms"] == pytest.approx(one["grad_norms"], rel=NORM_BOUND * case.rounding)
        assert rank["lrs"] == one["lrs"]
        assert not rank["skipped"]


@pytest.mark.parametrize("case", cases_with("updates"), ids=lambda case: case.name)
def test_updates_use_the_communicators_that_the_plan_counts(case: Case, outcomes: Outcomes) -> None:
    model = outcomes.models[case.model].config
    ranks = outcomes.by_rank(case, "updates")
    has_experts = not {"num_experts", "n_routed_experts"}.isdisjoint(model)
    tied = model.get("tie_word_embeddings", False) or case.trains_mtp
    counted = communicators(LayoutConfig(**case.sizes), len(ranks), has_experts, tied)
    used = {name for rank in ranks for name in rank["groups"]}
    planned = {group.group for group in counted}
    # WORLD is the weight sync's; the other is used by newer versions of Megatron, and by routers with a bias only.
    assert used <= planned
    assert planned - used <= {WORLD, "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"}


@pytest.mark.parametrize("case", cases_with("updates"), ids=lambda case: case.name)
def test_reference_is_the_first_policy_and_swap_keeps_the_policy(case: Case, outcomes: Outcomes) -> None:
    ranks = outcomes.by_rank(case, "updates")
    assert all(rank["kept"] for rank in ranks)
    assert all(all(rank["reference"]) for rank in ranks)
    assert any(rank["reference"] for rank in ranks)


@pytest.mark.parametrize("case", cases_with("resumed"), ids=lambda case: case.name)
def test_another_layout_loads_the_weights_bit_for_bit(case: Case, outcomes: Outcomes) -> None:
    saved = updated(CASES[case.loads], outcomes, SAVED_AFTER)
    loaded = outcomes.weights(case, "resumed", 0)
    assert saved.keys() == loaded.keys()
    assert [name for name in saved if not saved[name].equal(loaded[name])] == []


@pytest.mark.parametrize("case", cases_with("resumed"), ids=lambda case: case.name)
def test_the_next_update_is_that_of_the_undisturbed_run(case: Case, outcomes: Outcomes) -> None:
    saver = CASES[case.loads]
    before = updated(saver, outcomes, SAVED_AFTER)
    resumed = outcomes.weights(case, "resumed", 1)
    assert not wrong_changes(resumed, updated(saver, outcomes, UPDATES), before, CHANGE_BOUND * case.rounding)
    for rank in outcomes.by_rank(case, "resumed"):
        undisturbed = {
            name: outcomes.by_rank(saver, "updates")[0][name][SAVED_AFTER:] for name in ("grad_norms", "lrs")
        }
        assert rank["grad_norms"] == pytest.approx(undisturbed["grad_norms"], rel=NORM_BOUND * case.rounding)
        assert rank["lrs"] == undisturbed["lrs"]
