"""A reward of the user's that scores one completion is called for each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rewards.scorer import RewardStats, Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleGroup

MakeGroup = Callable[..., SampleGroup]
CODE = """
import asyncio

def length(prompt, completion, level, completion_ids, log_extra, log_metric, **_):
    assert (prompt, level) == ("3+4?", 2) and len(completion_ids) == len(completion)
    log_extra("first", completion[0])
    if completion != "ab":
        log_extra("other", 1)
    log_metric("longest", len(completion))
    return len(completion) / 10

class Stateful:
    def __call__(self, completion, **_):
        return {"bad": "no number", "none": None}.get(completion, 1.0)

stateful = Stateful()

def fragile(completion, **_):
    if completion == "bad":
        raise ValueError("no such thing")
    return 1.0

waiting = []

async def together(completion, **_):
    waiting.append(completion)
    while len(waiting) % 3:
        await asyncio.sleep(0.001)
    if completion == "bad":
        raise ValueError("no such thing")
    return 0.5

def narrow(completion, prompt):
    return 1.0
"""


@pytest.fixture
def score(tmp_path: Path) -> Callable[..., tuple[list[float], RewardStats, SampleGroup]]:
    (tmp_path / "single.py").write_text(CODE)

    def score(name: str, group: SampleGroup, **settings: Any) -> tuple[list[float], RewardStats, SampleGroup]:
        reward = {"functions": {f"{tmp_path / 'single.py'}:{name}": 1.0}, **settings}
        scorer = Scorer(RewardConfig.model_validate(reward), 10)
        scored = scorer.score_group(group)
        return [sample.reward for sample in scored.samples], scorer.take_stats(), scored

    return score


def test_each_completion_gets_its_own_columns(score: Any, make_group: MakeGroup) -> None:
    rewards, stats, scored = score("length", make_group(["ab", "cde"], prompt="3+4?", level=2))
    assert rewards == pytest.approx([0.2, 0.3])
    assert [sample.extra for sample in scored.samples] == [{"first": "a", "other": None}, {"first": "c", "other": 1}]
    assert stats.logged == {"longest": 2.5}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("fragile", "bad", "raised ValueError: no such thing"),
        ("together", "bad", "raised ValueError: no such thing"),
        ("stateful", "bad", "raised ValueError: could not convert string to float: 'no number'"),
    ],
)
def test_a_call_that_fails_is_a_failure_of_the_group(
    name: str, text: str, reason: str, score: Any, make_group: MakeGroup
) -> None:
    """Coroutines of a group wait at the same time."""
    group = make_group(["a", text, "b"])
    with pytest.raises(UserError, match=rf"^reward {name}: prompt 12: {reason}; sample "):
        score(name, group)
    rewards, stats, _ = score(name, group, on_error=-2.0)
    assert rewards == [-2.0, -2.0, -2.0]
    assert stats.failures == {name: 1}


def test_a_function_with_another_signature_is_refused_at_the_start(score: Any, make_group: MakeGroup) -> None:
    with pytest.raises(UserError, match=r"^reward\.functions '.*single\.py:narrow': as reward function it is called"):
        score("narrow", make_group(["a"]))
