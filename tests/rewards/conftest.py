from collections.abc import Callable
from typing import Any

import pytest

from grpo_mp.rewards.math import MathVerifier
from grpo_mp.utils.types import Prompt, Sample, SampleGroup


@pytest.fixture
def make_group() -> Callable[..., SampleGroup]:
    """Makes one group with a response per text; tokens are the text's character codes."""

    def make(texts: list[str], answer: str | None = "7", **columns: Any) -> SampleGroup:
        prompt = Prompt(index=12, text="3+4?", tokens=(1, 2), answer=answer, columns=columns or {"prompt": "3+4?"})
        return SampleGroup(prompt, tuple(_sample(i, text) for i, text in enumerate(texts)))

    return make


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mp.rewards.reward_model.BACKOFF_S", 0.01)


def _sample(index: int, text: str) -> Sample:
    return Sample(
        group_id=5,
        index=index,
        prompt_tokens=(1, 2),
        tokens=tuple(map(ord, text)),
        rollout_logprobs=(-1.0,) * len(text),
        weight_versions=(0,) * len(text),
        truncated=False,
        text=text,
    )


def hurry(verifier: MathVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give comparisons with a tower of powers, which are endless, a short limit, and the others a long one."""
    compare = verifier.equal

    def equal(expected: str, predicted: str) -> bool | None:
        verifier.limit_s = 1.0 if "9^" in expected + predicted else 60.0
        return compare(expected, predicted)

    monkeypatch.setattr(verifier, "equal", equal)
