"""Routing replay between a real engine and the policy, in bfloat16."""

import pytest

from tests.bench.routing_mismatch import measure


@pytest.mark.slow
def test_replay_leaves_no_expert_differing_and_lowers_the_mismatch() -> None:
    plain, replayed = measure("deepseek_v3")
    assert plain.differing > 0
    assert replayed.differing == 0
    assert replayed.kl < plain.kl / 3
    assert replayed.largest < plain.largest / 3
