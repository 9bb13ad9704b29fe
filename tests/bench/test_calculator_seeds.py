"""The bench of the calculator judges by products that no seed's model has seen, and on which nothing was chosen."""

import pytest

from grpo_mp.cli.make_tiny import _parser
from grpo_mp.examples.calculator import make_problems
from tests.bench.calculator_seeds import CHOSEN_ON, FRESH, TRAIN, fresh_problems


@pytest.mark.parametrize("seed", [0, 1])
def test_fresh_problems_are_in_neither_set_of_make_tiny(seed: int) -> None:
    defaults = _parser().parse_args([])
    assert (defaults.train, defaults.eval) == (TRAIN, CHOSEN_ON)
    train, held_out = make_problems(defaults.train, defaults.eval, seed)
    fresh = {problem.operands for problem in fresh_problems(seed)}
    assert len(fresh) == FRESH
    assert not fresh & {problem.operands for problem in (*train, *held_out)}
