"""The bench of the calculator judges by products that no seed's model has seen, and on which nothing was chosen."""

from pathlib import Path

import pytest

from tests.bench.calculator_seeds import CHOSEN_ON, FRESH, TRAIN, accuracies, fresh_problems, run
from tools.tiny.make import make_parser
from tools.tiny.products import make_problems


@pytest.mark.parametrize("seed", [0, 1])
def test_fresh_problems_are_in_neither_set_of_make_tiny(seed: int) -> None:
    defaults = make_parser().parse_args([])
    assert (defaults.train, defaults.eval) == (TRAIN, CHOSEN_ON)
    train, held_out = make_problems(defaults.train, defaults.eval, seed)
    fresh = {problem.operands for problem in fresh_problems(seed)}
    assert len(fresh) == FRESH
    assert not fresh & {problem.operands for problem in (*train, *held_out)}


@pytest.mark.nightly
def test_the_policy_learns_to_call_the_calculator(tmp_path: Path) -> None:
    """The bounds are below what seeds 0 to 2 reached by 10 points and more; cold start and training take minutes."""
    run(0, tmp_path)
    before, after, *without = accuracies(tmp_path)
    assert before < 0.45
    assert after > 0.7
    assert max(without) < 0.05  # it calls because it cannot do without
