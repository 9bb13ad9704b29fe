"""Reward functions as published for TRL and verl, which call math-verify."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.types import SampleGroup

REWARDS = r"""
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from math_verify.metric import math_metric

def accuracy(completions, solution, **kwargs):
    scores = []
    for content, gold in zip(completions, solution):
        gold_parsed = parse(gold, extraction_mode="first_match")
        answer_parsed = parse(content, extraction_config=[LatexExtractionConfig(boxed_match_priority=0)])
        scores.append(float(verify(gold_parsed, answer_parsed)))
    return scores

def compute_score(completions, solution, **kwargs):
    check = math_metric(gold_extraction_target=(LatexExtractionConfig(),),
                        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()))
    scores = []
    for content, gold in zip(completions, solution):
        try:
            score, _ = check([gold], [content])
        except TimeoutException:
            score = -1.0
        except Exception:  # as published: a text that cannot be read scores nothing
            score = 0.0
        scores.append(score)
    return scores
"""


@pytest.mark.parametrize("function", ["accuracy", "compute_score"])
def test_published_rewards_run_unchanged(function: str, make_group: Callable[..., SampleGroup], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    scorer = Scorer(RewardConfig(functions={f"{tmp_path / 'mine.py'}:{function}": 1.0}, timeout_s=300), 100, "prompt")
    group = make_group([r"so \boxed{\frac{10}{2}}", r"so \boxed{6}"], prompt="3+2?", solution="$5$")
    assert [sample.reward for sample in scorer.score_group(group).samples] == [1.0, 0.0]
    scorer.close()
