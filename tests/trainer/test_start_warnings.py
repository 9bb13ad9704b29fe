"""Warnings of a start: samples from another distribution than the loss assumes."""

from typing import Any

import pytest

from grpo_mp.config import Settings, check_settings
from grpo_mp.trainer.preflight import start_warnings
from tests.minimal_settings import MINIMAL_SETTINGS

CORRECTED = {"rollout_correction": {"kind": "truncate", "high": 2.0}}


def settings_of(algorithm: Any = "grpo", **sections: dict[str, Any]) -> Settings:
    tree: dict[str, Any] = {**MINIMAL_SETTINGS, "algorithm": algorithm}
    return check_settings(tree | {name: {**tree.get(name, {}), **own} for name, own in sections.items()}, "test.yaml")


@pytest.mark.parametrize(
    ("settings", "fp8", "sentence"),
    [
        (settings_of(), True, "engines compute in FP8"),
        (settings_of(rollout={"max_staleness": 1}), False, "rollout.max_staleness=1 trains on tokens of older weights"),
        (settings_of(), False, ""),
        (settings_of(CORRECTED), True, ""),
        (settings_of({"old_logprobs": "engine"}), True, ""),  # ratios to the engine correct for it
    ],
)
def test_start_warnings(settings: Settings, fp8: bool, sentence: str) -> None:
    found = start_warnings(settings.algorithm, settings.rollout, fp8)
    assert len(found) == bool(sentence)
    assert all(sentence in one for one in found)
