"""Loss and gradient of supervised fine-tuning: every layout against TRL's SFTTrainer on the same chats."""

from functools import cache
from pathlib import Path

import pytest

from tests.parallel.cases import Case, cases_with
from tests.parallel.chats import CHATS
from tests.parallel.conftest import Outcomes
from tests.parallel.full_model import exceeding, relative_errors
from tests.parallel.trl_sft import TrlStep, trl_step

BOUND = 1e-5
trl = cache(trl_step)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(params=CHATS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("case", cases_with("supervised"), ids=lambda case: case.name)
def test_loss_and_gradient_are_those_of_trl(case: Case, kind: str, outcomes: Outcomes, output: Path) -> None:
    expected: TrlStep = trl(outcomes.models[case.model].folder, kind, output)
    for rank in outcomes.by_rank(case, "supervised"):
        sums = rank[kind]["sums"]
        assert sums["tokens"] == expected.tokens
        assert sums["loss"] == pytest.approx(expected.loss, rel=BOUND)
        assert sums["entropy"] / sums["tokens"] == pytest.approx(expected.entropy, rel=BOUND)
    gradient = outcomes.family_gradient(case, kind, "supervised")
    assert not exceeding(relative_errors(gradient, expected.gradient), BOUND)
