"""Warnings and refusals of a start: samples from another distribution than the loss assumes."""

import re
from typing import Any

import pytest

from grpo_mp.config import Settings, check_settings
from grpo_mp.trainer.preflight import start_warnings
from grpo_mp.utils.errors import UserError
from tests.minimal_settings import MINIMAL_SETTINGS

DISTILLATION = {"teacher": {"path": "http://localhost:1"}, "topk": 4}
CORRECTED = {"rollout_correction": {"kind": "truncate", "high": 2.0}}


def settings_of(algorithm: Any = "grpo", **sections: dict[str, Any]) -> Settings:
    tree: dict[str, Any] = {**MINIMAL_SETTINGS, "algorithm": algorithm}
    return check_settings(tree | {name: {**tree.get(name, {}), **own} for name, own in sections.items()}, "test.yaml")


@pytest.mark.parametrize(
    ("settings", "precision", "sentence"),
    [
        (settings_of(), "FP8", "engines compute in FP8"),
        (settings_of(rollout={"max_staleness": 1}), None, "rollout.max_staleness=1 trains on tokens of older weights"),
        (settings_of(), None, ""),
        (settings_of(CORRECTED), "INT4", ""),
        (settings_of({"old_logprobs": "engine"}), "FP8", ""),  # ratios to the engine correct for it
    ],
)
def test_start_warnings(settings: Settings, precision: str | None, sentence: str) -> None:
    found = start_warnings(settings.algorithm, settings.rollout, precision)
    assert len(found) == bool(sentence)
    assert all(sentence in one for one in found)


@pytest.mark.parametrize(
    ("top_p", "sections", "sentence"),
    [
        ({"top_k": 2000}, {}, "an engine returns at most 1024 kept tokens: lower it"),
        ({"min_p": 0.1}, {"engine": {"deterministic": True}}, "SGLang draws no seeded samples by min_p"),
        (0.9, {"engine": {"speculative": {"algorithm": "ngram"}}}, "set rollout.top_p=1 or engine.speculative"),
        (0.9, {"algorithm": {"distillation": DISTILLATION}}, "set rollout.top_p=1 or distillation.topk=null"),
        ({"top_k": 2.5}, {}, "top_k=2.5: give a whole number of tokens"),
        ({"top_p": 0}, {}, "top_p=0: give a probability above 0"),
        ({"min_p": 1}, {}, "min_p=1: give a share of the largest probability"),
        ({"topp": 0.9}, {}, "topp"),
    ],
)
def test_truncated_sampling_that_cannot_be_trained_is_refused(top_p: Any, sections: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        settings_of(**{"rollout": {"top_p": top_p}, **sections})
