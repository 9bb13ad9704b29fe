"""Each test simulates for itself: what another has played, in a world that a test changed, is no answer."""

from collections.abc import Iterator

import pytest

from grpo_mp.simulation.loop import simulate


@pytest.fixture(autouse=True)
def _forget_runs() -> Iterator[None]:
    simulate.cache_clear()
    yield
    simulate.cache_clear()
