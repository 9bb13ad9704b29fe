"""Routing replay between a real engine and the policy, in bfloat16."""

import pytest

from tests.bench.routing_mismatch import FAMILIES, measure

IN_CI = "deepseek_v3"  # sigmoid with bias, in groups
MARKED = [pytest.param(name, marks=pytest.mark.slow if name == IN_CI else pytest.mark.nightly) for name in FAMILIES]


@pytest.mark.parametrize("family", MARKED)
def test_replay_leaves_no_expert_differing_and_lowers_the_mismatch(family: str) -> None:
    plain, replayed = measure(family)
    assert plain.differing > 0
    assert replayed.differing == 0
    assert replayed.kl < plain.kl / 3
    assert replayed.largest < plain.largest / 3
