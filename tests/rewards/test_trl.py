"""Functions written for TRL run unchanged: TRL's own trainer code and the scorer call them on the same data.

As do functions published for TRL and verl that call math-verify.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState

import grpo_mp.platform
from grpo_mp.rewards.base import call_arguments
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.types import SampleGroup

pytest.importorskip("trl")
if not torch.cuda.is_available():
    # TRL imports torchvision, whose wheel is built for CUDA: the CPU engines' start-up hook lets it import.
    runpy.run_path(str(Path(grpo_mp.platform.__file__).parent / "engine_site" / "sitecustomize.py"))

from trl import GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

MakeGroup = Callable[..., SampleGroup]
CHAT = [{"role": "user", "content": "3+4?"}]
TEXTS = [r"<think>easy</think>\boxed{\frac{14}{2}}", r"\boxed{8}", "<think>7"]
OVERLONG = get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=15)


def trl_rewards(functions: list[Any], row: dict[str, Any], group: SampleGroup) -> torch.Tensor:
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[f"reward_{i}" for i in range(len(functions))],
        state=TrainerState(global_step=3),
        environments=None,
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    is_chat = isinstance(row["prompt"], list)
    completions = [[{"role": "assistant", "content": s.text}] if is_chat else s.text for s in group.samples]
    count = len(group.samples)
    ids = [list(sample.tokens) for sample in group.samples]
    calculate = GRPOTrainer._calculate_rewards.__wrapped__
    return calculate(trainer, [row] * count, [row["prompt"]] * count, completions, ids)


@pytest.mark.parametrize("prompt", ["3+4?", CHAT])
def test_functions_get_the_same_arguments(prompt: Any, make_group: MakeGroup) -> None:
    row = {"prompt": prompt, "solution": "$7$", "level": 3, "completion": "unused"}
    group = make_group(TEXTS, **row)
    calls: list[dict[str, Any]] = []

    def record(**arguments: Any) -> list[float]:
        calls.append(arguments)
        return [0.0] * len(arguments["prompts"])

    trl_rewards([record], row, group)
    others = {"trainer_state": TrainerState(global_step=3), **dict.fromkeys(("log_extra", "log_metric"), print)}
    record(**call_arguments(group, "prompt", **others))
    expected, actual = calls
    assert set(expected) == set(actual)
    functions = ("log_extra", "log_metric")
    assert all(callable(actual[name]) for name in functions)
    assert {k: v for k, v in expected.items() if k not in functions} == {
        k: v for k, v in actual.items() if k not in functions
    }


def test_trl_s_own_rewards_score_the_same_here(make_group: MakeGroup) -> None:
    row = {"prompt": CHAT, "solution": "$7$"}
    group = make_group(TEXTS, **row)
    names = ["trl.rewards:accuracy_reward", "trl.rewards:think_format_reward", f"{__file__}:OVERLONG"]
    expected = trl_rewards([accuracy_reward, think_format_reward, OVERLONG], row, group)
    assert all(len(set(column.tolist())) > 1 for column in expected.T)
    scorer = Scorer(RewardConfig(functions=dict.fromkeys(names, 1.0)), 100, "prompt")
    parts = [list(sample.reward_terms.values()) for sample in scorer.score_group(group).samples]
    torch.testing.assert_close(torch.tensor(parts), expected)


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
