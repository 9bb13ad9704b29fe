import pytest

from grpo_mp.algorithms.losses import current_coefficients, should_early_stop, update_adaptive_coefs
from grpo_mp.algorithms.settings import AlgorithmConfig, EarlyStopConfig


def test_the_kl_weight_follows_its_target_at_a_bounded_pace() -> None:
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 0.1, "target": 0.5}})
    up, down = (update_adaptive_coefs({}, kl=kl, entropy=1.0, algorithm=algorithm)["kl"] for kl in (50.0, 0.0))
    assert (up, down) == (pytest.approx(0.1 * 1.02), pytest.approx(0.1 * 0.98))
    assert update_adaptive_coefs({}, kl=0.55, entropy=1.0, algorithm=algorithm)["kl"] == pytest.approx(0.1 * 1.01)
    adaptive_coefs: dict[str, float] = {}
    for _ in range(1000):  # where the KL falls with the weight, they meet at the target
        adaptive_coefs = update_adaptive_coefs(
            adaptive_coefs, 0.2 / current_coefficients(adaptive_coefs, algorithm).kl, 1.0, algorithm
        )
    assert 0.2 / adaptive_coefs["kl"] == pytest.approx(0.5, rel=0.01)


def test_the_entropy_bonus_acts_at_or_below_its_target_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mp.algorithms.losses.ENTROPY_STEP", 0.1)
    monkeypatch.setattr("grpo_mp.algorithms.losses.MAX_ENTROPY_COEF", 0.25)
    algorithm = AlgorithmConfig.model_validate({"entropy": {"target": 0.2}})
    assert current_coefficients({}, algorithm).entropy == 0.0
    adaptive_coefs: dict[str, float] = {}
    weights = []
    for entropy in (0.1, 0.1, 0.1, 0.5, 0.2):
        adaptive_coefs = update_adaptive_coefs(adaptive_coefs, 0.0, entropy, algorithm)
        weights.append((adaptive_coefs["entropy"], current_coefficients(adaptive_coefs, algorithm).entropy))
    assert weights == [
        pytest.approx(pair) for pair in ((0.1, 0.1), (0.2, 0.2), (0.25, 0.25), (0.15, 0.0), (0.25, 0.25))
    ]


@pytest.mark.parametrize(
    ("limits", "kl", "stops"),
    [
        ({}, 9.0, False),
        ({"max_kl": 0.1}, 0.11, True),
        ({"max_kl": 0.1}, 0.09, False),
        ({"max_kl": 0.1}, float("nan"), True),
    ],
)
def test_early_stop_limits(limits: dict[str, float], kl: float, stops: bool) -> None:
    assert should_early_stop(kl, EarlyStopConfig.model_validate(limits)) is stops
