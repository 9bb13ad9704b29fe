"""PPO's critic: one rank against a linear head in transformers, every layout and a resumed run against one rank."""

import pytest
import torch

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.value_head import critic_config, critic_params
from tests.parallel.cases import CASES, CRITIC, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import Tensors, difference, exceeding, full_tensors, relative_errors
from tests.parallel.inputs import SAVED_AFTER, UPDATES
from tests.parallel.test_updates import CHANGE_BOUND, NORM_BOUND

BOUND = 1e-5
every_case = pytest.mark.parametrize("case", cases_with("critic"), ids=lambda case: case.name)
every_load = pytest.mark.parametrize("case", cases_with("critic_resumed"), ids=lambda case: case.name)


def one_rank(case: Case) -> Case:
    return CASES[f"{case.model}-one-critic"]


def joined(case: Case, outcomes: Outcomes, measure: str, update: int | None = None) -> Tensors:
    """The gradient by the files' names, or the weights after one of the measure's updates."""
    folder = outcomes.models[case.model].folder
    ranks = outcomes.by_rank(case, measure)
    params = critic_params(critic_config(HfConfig.read(folder)))
    shards = [rank["shards"] if update is None else rank["weights"][update] for rank in ranks]
    return full_tensors(folder, shards, [rank["held"] for rank in ranks], 1e-6 if update is None else 0.0, params)


@pytest.mark.parametrize("case", [CASES[f"{model}-one-critic"] for model in CRITIC], ids=lambda case: case.name)
def test_values_loss_and_gradient_of_one_rank_are_those_of_transformers(case: Case, outcomes: Outcomes) -> None:
    expected = outcomes.models[case.model].expected.critic
    (rank,) = outcomes.by_rank(case, "critic")
    assert rank["sums"]["value_loss"] == pytest.approx(expected.loss, rel=BOUND)
    assert 0.05 < rank["sums"]["vf_clipped"] / rank["sums"]["tokens"] < 0.95
    order = sorted(range(len(rank["values"]["sample"])), key=lambda row: _place(rank["values"], row))
    values = rank["values"]["value"][order]
    torch.testing.assert_close(values, torch.cat(list(expected.values)), rtol=BOUND, atol=BOUND)
    assert not exceeding(relative_errors(joined(case, outcomes, "critic"), expected.gradient), BOUND)


def _place(rows: Tensors, row: int) -> tuple[int, int]:
    return int(rows["sample"][row]), int(rows["position"][row])


@every_case
def test_the_gradient_of_every_layout_is_that_of_one_rank(case: Case, outcomes: Outcomes) -> None:
    errors = relative_errors(joined(case, outcomes, "critic"), joined(one_rank(case), outcomes, "critic"))
    assert not exceeding(errors, BOUND)


@every_case
def test_every_rank_knows_loss_and_advantages_of_one_rank(case: Case, outcomes: Outcomes) -> None:
    """Advantages go along sequences, which context-parallel ranks share."""
    (one,) = outcomes.by_rank(one_rank(case), "critic")
    for rank in outcomes.by_rank(case, "critic"):
        assert rank["sums"] == pytest.approx(one["sums"], rel=BOUND)
        assert rank["advantages"] == pytest.approx(one["advantages"], rel=BOUND)
        assert rank["grad_norms"] == pytest.approx(one["grad_norms"], rel=NORM_BOUND)
        assert not rank["skipped"]


@pytest.mark.parametrize("update", [0, UPDATES - 1])
@every_case
def test_weights_change_as_on_one_rank(case: Case, update: int, outcomes: Outcomes) -> None:
    own, one = (joined(each, outcomes, "critic", update) for each in (case, one_rank(case)))
    start = joined(one_rank(case), outcomes, "critic", 0) if update else _start(case, outcomes, one)
    errors = relative_errors(difference(own, start), difference(one, start))
    assert not exceeding({kind: e for kind, e in errors.items() if not kind.endswith("correction_bias")}, CHANGE_BOUND)


def _start(case: Case, outcomes: Outcomes, like: Tensors) -> Tensors:
    """The weights of the folder; the head as if it had been zero."""
    stored = outcomes.models[case.model].tensors
    return {name: stored.get(name, torch.zeros_like(tensor)) for name, tensor in like.items()}


@every_load
def test_another_layout_loads_and_goes_on(case: Case, outcomes: Outcomes) -> None:
    saver = CASES[case.loads]
    (measure,) = saver.measures
    saved = joined(saver, outcomes, measure, SAVED_AFTER - 1)
    loaded = joined(case, outcomes, "critic_resumed", 0)
    assert saved.keys() == loaded.keys()
    assert [name for name in saved if not saved[name].equal(loaded[name])] == []
    undisturbed = difference(joined(saver, outcomes, measure, SAVED_AFTER), saved)
    errors = relative_errors(difference(joined(case, outcomes, "critic_resumed", 1), loaded), undisturbed)
    assert not exceeding({kind: e for kind, e in errors.items() if not kind.endswith("correction_bias")}, CHANGE_BOUND)
