from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import SampleGroup

MakeGroup = Callable[..., SampleGroup]
FUNCTIONS = """
import numpy
def lines(completions, completion_ids, log_metric, **columns):
    log_metric("columns", len(columns))
    return [[(i, 0.5 * n) for n, i in enumerate(j for j, t in enumerate(ids) if t == 10)] for ids in completion_ids]
async def later(completions, **columns): return [[(numpy.int64(0), numpy.float32(2))]] * len(completions)
def none(completions, **columns): return [None, []]
def few(**columns): return [[(0, 1.0)]]
def beyond(**columns): return [[(0, 1.0)], [(4, 1.0)]]
def infinite(**columns): return [[], [(0, float("inf"))]]
def numbers(**columns): return [[1.0], [2.0]]
"""
FAILURES = {
    "few": r"returned 1 lists of steps for 2 samples",
    "beyond": r"returned the step \(4, 1\.0\) after one at -1: ends ascend, below 4, and rewards are finite; sample 1",
    "infinite": r"returned the step \(0, inf\) after one at -1: ends ascend, .* finite; sample 1: 'd\\ne\\n'",
    "numbers": r"returned \[1.0\] where \(end token index, reward\) pairs belong",
}


@pytest.fixture
def score(tmp_path: Path, make_group: MakeGroup) -> Callable[..., tuple[SampleGroup, Scorer]]:
    """Scores the texts "a\\nb\\n" and "d\\ne\\n", one token per character, with one of the functions above."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def run(function: str, **settings: Any) -> tuple[SampleGroup, Scorer]:
        scorer = Scorer(RewardConfig(steps=f"{tmp_path / 'mine.py'}:{function}", **settings), max_response_tokens=8)
        return scorer.score_group(make_group(["a\nb\n", "d\ne\n"])), scorer

    return run


def steps(group: SampleGroup) -> list[Any]:
    return [sample.step_rewards for sample in group.samples]


def test_step_rewards_are_kept_apart_from_the_outcome(score: Callable[..., Any]) -> None:
    group, scorer = score("lines", overlong={"weight": 1.0, "buffer_tokens": 8})
    assert steps(group) == [((1, 0.0), (3, 0.5))] * 2
    assert [(sample.reward, sample.reward_terms) for sample in group.samples] == [
        (-0.5, {"overlong": -0.5, "steps": 0.25})
    ] * 2
    assert scorer.take_stats().logged == {"columns": 3.0}  # prompts, log_extra, trainer_state


def test_steps_alone_leave_no_sample_unscored(score: Callable[..., Any]) -> None:
    group, scorer = score("later")
    assert steps(group) == [((0, 2.0),)] * 2
    assert [type(number) for number in group.samples[0].step_rewards[0]] == [int, float]
    assert (scorer.take_stats().unscored, group.samples[0].reward, group.samples[0].is_scored) == (0, 0.0, True)


@pytest.mark.parametrize("function", FAILURES)
def test_wrong_shapes(function: str, score: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=rf"^reward steps: prompt 12: .*({FAILURES[function]})") as raised:
        score(function)
    assert "\n" not in str(raised.value)
    group, scorer = score(function, on_error=-0.5)
    assert steps(group) == [((3, -0.5),)] * 2
    assert scorer.take_stats().failures == {"steps": 1}
