from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.algorithms.aggregation import token_weights
from grpo_mp.algorithms.settings import Algorithm

SAMPLES = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=50)
LIMIT = 6000


def weights(samples: list[tuple[int, bool]], aggregation: str, **more: float) -> list[list[float]]:
    """Of every token of every sample."""
    lengths, learns = [length for length, _ in samples], [yes for _, yes in samples]
    algorithm = Algorithm.model_validate({"aggregation": aggregation, **more})
    found = token_weights(lengths, learns, algorithm, LIMIT)
    return [torch.as_tensor(w, dtype=torch.float64).expand(n).tolist() for n, w in zip(lengths, found, strict=True)]


@given(SAMPLES)
def test_each_weight_is_the_formula_s(samples: list[tuple[int, bool]]) -> None:
    count, tokens = len(samples), sum(length for length, yes in samples if yes)
    formulas = {
        "sequence_mean": lambda n: Fraction(1, count * n),
        "token_mean": lambda n: Fraction(1, tokens),
        "sequence_sum": lambda n: Fraction(1, count),
        "constant": lambda n: Fraction(1, count * LIMIT),
    }
    for name, formula in formulas.items():
        for (length, yes), found in zip(samples, weights(samples, name), strict=True):
            assert found == [float(formula(length)) if yes else 0.0] * length  # one division, rounded once


def test_the_control_token_has_a_weight_of_its_own() -> None:
    (first, only), alpha, count = weights([(4, True), (1, True)], "decoupled", control_weight=0.01), 0.01, 2
    assert first == pytest.approx([alpha / count] + [1 / (3 * count)] * 3)
    assert only == pytest.approx([alpha / count])


def test_an_update_in_which_nothing_learns() -> None:
    assert weights([(3, False), (2, False)], "token_mean") == [[0.0] * 3, [0.0] * 2]
