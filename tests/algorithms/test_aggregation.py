from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.algorithms.losses import token_weights
from grpo_mp.algorithms.settings import AlgorithmConfig

SAMPLES = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=50)
LIMIT = 6000


def weights(samples: list[tuple[int, bool]], aggregation: str, **changes: float) -> list[list[float]]:
    lengths, in_loss = [length for length, _ in samples], [included for _, included in samples]
    algorithm = AlgorithmConfig.model_validate({"aggregation": aggregation, **changes})
    by_sample = token_weights(lengths, in_loss, algorithm, LIMIT)
    return [torch.as_tensor(w, dtype=torch.float64).expand(n).tolist() for n, w in zip(lengths, by_sample, strict=True)]


@given(SAMPLES)
def test_each_weight_follows_its_formula(samples: list[tuple[int, bool]]) -> None:
    count, tokens = len(samples), sum(length for length, included in samples if included)
    formulas = {
        "sequence_mean": lambda n: Fraction(1, count * n),
        "token_mean": lambda n: Fraction(1, tokens),
        "sequence_sum": lambda n: Fraction(1, count),
        "constant": lambda n: Fraction(1, count * LIMIT),
    }
    for name, formula in formulas.items():
        for (length, included), actual in zip(samples, weights(samples, name), strict=True):
            assert actual == [float(formula(length)) if included else 0.0] * length  # one division, rounded once


def test_the_control_token_has_a_weight_of_its_own() -> None:
    (long, short), alpha, count = weights([(4, True), (1, True)], "decoupled"), 0.001, 2
    assert long == pytest.approx([alpha / count] + [1 / (3 * count)] * 3)
    assert short == pytest.approx([alpha / count])
