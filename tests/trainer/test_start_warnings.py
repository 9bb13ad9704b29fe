"""What a start warns of: settings that do nothing with one update a step, and FP8 engines without a correction."""

from typing import Any

import pytest

from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.config import Settings, check_settings
from grpo_mp.planner.model_configs import named_config
from grpo_mp.trainer.preflight import start_warnings, sync_warnings
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.planner.jobs import settings_of as job_settings


def settings_of(algorithm: Any, **training: Any) -> Settings:
    tree = MINIMAL_SETTINGS | {"algorithm": algorithm, "training": training}
    return check_settings(tree | {"reward": {"answer": 1.0, "steps": "rewards.py:steps"}}, "test.yaml")


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "cispo", "gmpo", "sapo", "vespo", "luspo", "dapo", "rloo"])
def test_single_update_warns_of_unused_ratio(name: str) -> None:
    (sentence,) = start_warnings(settings_of(name, updates_per_step=1), fp8=False)
    assert f"algorithm.preset={name}" in sentence
    assert "every importance ratio is 1" in sentence
    assert "\n" not in sentence
    assert not start_warnings(settings_of(name, updates_per_step=2), fp8=False)
    assert not start_warnings(settings_of(name, updates_per_step=1, epochs=2), fp8=False)


def test_what_is_named_is_what_does_nothing() -> None:
    assert "ratio=sequence, clip has no effect" in start_warnings(settings_of("gspo"), fp8=False)[0]
    assert "policy_loss=sapo has no effect" in start_warnings(settings_of("sapo"), fp8=False)[0]
    quiet = ("grpo", "dr_grpo", "bnpo", "reinforce_pp", "grpo_process")
    assert not [name for name in quiet if start_warnings(settings_of(name), fp8=False)]
    assert set(quiet) < set(PRESETS)


def test_ratios_to_the_engine_are_not_one() -> None:
    assert not start_warnings(settings_of({"preset": "gspo", "old_logprobs": "engine"}), fp8=False)
    vespo = {"preset": "vespo", "rollout_correction": {"kind": "truncate", "high": 2.0}}
    assert not start_warnings(settings_of(vespo), fp8=False)


def test_fp8_engine_without_correction_warns() -> None:
    (sentence,) = start_warnings(settings_of("grpo"), fp8=True)
    assert "engines compute in FP8" in sentence
    assert not start_warnings(settings_of({"rollout_correction": {"kind": "truncate", "high": 2.0}}), fp8=True)
    # Ratios to the engine are not corrected: they are the update's own.
    assert not start_warnings(settings_of({"old_logprobs": "engine"}), fp8=True)


def test_tokens_of_older_weights_want_a_correction() -> None:
    settings = settings_of("grpo")
    rollout = settings.rollout.model_copy(update={"max_staleness": 1})
    (sentence,) = start_warnings(settings.model_copy(update={"rollout": rollout}), fp8=False)
    assert "rollout.max_staleness=1 trains on tokens of older weights" in sentence


@pytest.mark.parametrize(("top_p", "share"), [(0.95, "0.05"), (0.7, "0.3"), (1.0, "")])
def test_a_cut_distribution_is_not_what_the_policy_trains_on(top_p: float, share: str) -> None:
    settings = settings_of("grpo")
    rollout = settings.rollout.model_copy(update={"top_p": top_p})
    told = start_warnings(settings.model_copy(update={"rollout": rollout}), fp8=False)
    assert len(told) == (top_p < 1)
    assert all(f"rollout.top_p={top_p:g} cuts up to {share} of the probability" in sentence for sentence in told)


def test_a_cache_in_fp8_wants_a_correction_as_well() -> None:
    settings = settings_of("grpo")
    engine = settings.engine.model_copy(update={"args": {"kv_cache_dtype": "fp8_e4m3"}})
    (sentence,) = start_warnings(settings.model_copy(update={"engine": engine}), fp8=False)
    assert "engines compute in FP8" in sentence


@pytest.mark.parametrize(
    ("layout", "args", "sentences"),
    [
        ({"expert": 8}, {}, []),
        ({"tensor": 2, "expert": 8}, {}, []),  # halves of 2,048, 6,144 and 4,096 rows are whole blocks
        ({"tensor": 4, "expert": 4, "expert_tensor": 2}, {}, []),
        (
            {"tensor": 4, "expert_tensor": 4},  # 192 of the 768 rows of an expert
            {},
            ["such as decoder.layers.0.mlp.experts.linear_fc1.weight0, inside blocks of 128 x 128: they travel in"],
        ),
        (
            {"expert": 8},
            {"enable_eplb": True},
            ["each weight sync brings all experts to each of an engine's 8 GPUs"],
        ),
    ],
)
def test_larger_weight_syncs_are_announced(layout: dict[str, int], args: dict[str, Any], sentences: list[str]) -> None:
    engine = {"gpus_per_engine": 8, "args": {"ep_size": 8, **args}}
    settings = job_settings(layout=layout, engine=engine, model={"path": "m", "dtype": "bfloat16"})
    warnings = sync_warnings(settings, named_config("Qwen3-30B-A3B"), fp8=True)
    assert len(warnings) == len(sentences)
    assert all(sentence in warning for sentence, warning in zip(sentences, warnings, strict=True))


@pytest.mark.parametrize(
    ("schedule", "staleness", "tokens_ahead", "warned"),
    [
        ("colocated", 0, None, False),
        ("colocated", 1, None, True),
        ("colocated", 1, 6, False),
        ("async", 2, None, True),
        ("async", 2, 6, False),
        ("one_step_off", 1, None, False),
    ],
)
def test_the_same_numbers_need_weights_that_no_clock_decides(
    schedule: str, staleness: int, tokens_ahead: int | None, warned: bool
) -> None:
    corrected = {"rollout_correction": {"kind": "truncate", "high": 2.0}}
    settings = settings_of(corrected)
    rollout = settings.rollout.model_copy(update={"max_staleness": staleness, "tokens_ahead": tokens_ahead})
    engine = settings.engine.model_copy(update={"deterministic": True, "ranks": int(schedule != "colocated")})
    told = start_warnings(
        settings.model_copy(update={"rollout": rollout, "engine": engine, "schedule": schedule}), fp8=False
    )
    assert [("the clock decides which weights draw a token" in sentence) for sentence in told] == [True] * warned
