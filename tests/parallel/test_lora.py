"""Adapters: of one rank against peft, of every other layout against one rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel import peft_model
from tests.parallel.cases import ADAPTED, CASES, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import Tensors, difference, exceeding, file_tensors, relative_errors
from tests.parallel.inputs import SAVED_AFTER, UPDATES
from tests.parallel.lora import folders

BOUND = 1e-5
MERGED_BOUND = 1e-6
CHANGE_BOUND = 5e-5
ONE = [CASES[f"{model}-one-lora"] for model in ADAPTED]


def exported(case: Case, outcomes: Outcomes) -> tuple[Path, Path]:
    outcomes.by_rank(case, "adapters")  # fails where the case broke
    return folders(outcomes.root / "checkpoints", case.name)


def gradient(case: Case, outcomes: Outcomes) -> Tensors:
    return outcomes.family_gradient(case, "", "adapters")


@pytest.mark.parametrize("case", ONE, ids=lambda case: case.name)
def test_peft_loads_the_folder_and_has_the_logits_weights_and_gradient_of_one_rank(
    case: Case, outcomes: Outcomes
) -> None:
    adapters, merged = exported(case, outcomes)
    expected = outcomes.models[case.model].expected
    model = peft_model.load_peft(expected.folder, adapters)
    ours = peft_model.load(merged)
    sequence = expected.given.sequence(0)
    logits = peft_model.logits(model, sequence)
    moved = peft_model.logits(peft_model.load(expected.folder), sequence)
    assert (logits - moved).abs().max() > 0.1 * expected.scale
    assert (logits - peft_model.logits(ours, sequence)).abs().max() <= 5e-6 * case.rounding * expected.scale
    assert not exceeding(
        relative_errors(gradient(case, outcomes), peft_model.gradient(model, expected)), BOUND * case.rounding
    )
    by_peft = peft_model.merged_state(model)
    own = ours.state_dict()
    assert by_peft.keys() == own.keys()
    assert not exceeding(relative_errors(dict(own), dict(by_peft)), MERGED_BOUND * case.rounding)


@pytest.mark.parametrize("case", cases_with("adapters"), ids=lambda case: case.name)
def test_gradient_and_folders_of_every_layout_are_those_of_one_rank(case: Case, outcomes: Outcomes) -> None:
    one = CASES[f"{case.model}-one-lora"]
    assert not exceeding(relative_errors(gradient(case, outcomes), gradient(one, outcomes)), BOUND * case.rounding)
    (adapters, merged) = exported(case, outcomes)
    (adapters_of_one, merged_of_one) = exported(one, outcomes)
    actual, expected = (load_file(folder / "adapter_model.safetensors") for folder in (adapters, adapters_of_one))
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
    assert not exceeding(
        relative_errors(file_tensors(merged), file_tensors(merged_of_one)), MERGED_BOUND * case.rounding
    )
    assert all(rank["adapters"]["frozen"] and rank["adapters"]["learned"] for rank in outcomes.ranks(case))


def updated(case: Case, outcomes: Outcomes, updates: int) -> Tensors:
    return outcomes.weights(case, "adapter_updates", updates - 1)


@pytest.mark.parametrize("case", cases_with("adapter_updates"), ids=lambda case: case.name)
def test_adapters_change_as_on_one_rank_and_nothing_else_does(case: Case, outcomes: Outcomes) -> None:
    one = CASES[f"{case.model}-one-lora"]
    (expected,) = outcomes.by_rank(one, "adapter_updates")
    for rank in outcomes.by_rank(case, "adapter_updates"):
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=BOUND * case.rounding)
        assert rank["kept"]
        assert all(rank["reference"])
    first = updated(case, outcomes, 1)
    last = updated(case, outcomes, UPDATES)
    base = outcomes.models[case.model].tensors
    assert [name for name in base if not torch.equal(base[name], last[name])] == []
    adapters = [name for name in first if ".lora_" in name]
    changes = [
        difference({n: after[n] for n in adapters}, {n: before[n] for n in adapters})
        for before, after in ((first, last), (updated(one, outcomes, 1), updated(one, outcomes, UPDATES)))
    ]
    assert not exceeding(relative_errors(*changes), CHANGE_BOUND * case.rounding)
    assert relative_errors(first, updated(one, outcomes, 1))["all"] <= BOUND * case.rounding


@pytest.mark.parametrize("case", cases_with("adapter_resumed"), ids=lambda case: case.name)
def test_another_layout_goes_on_with_the_adapters(case: Case, outcomes: Outcomes) -> None:
    saver = CASES[case.loads]
    before, after = (outcomes.weights(case, "adapter_resumed", moment) for moment in (0, 1))
    saved = updated(saver, outcomes, SAVED_AFTER)
    undisturbed = updated(saver, outcomes, UPDATES)
    assert [name for name in saved if not torch.equal(saved[name], before[name])] == []
    errors = relative_errors(difference(after, before), difference(undisturbed, saved))
    assert not exceeding(errors, CHANGE_BOUND * case.rounding)
