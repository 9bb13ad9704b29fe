"""Presets are data laid under the user's settings; parts that contradict each other are refused with a way out."""

import re
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.algorithms.presets import CORRECTIONS, PRESETS
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.config import Settings, check_settings, dump_settings, load_settings
from grpo_mp.utils.errors import UserError
from tools.write_pages import algorithms_page

BASE: dict[str, Any] = {
    "run": {"folder": "run", "steps": 1},
    "model": {"path": "model"},
    "data": {"train": "train.jsonl"},
    "rollout": {"prompts_per_step": 32, "group_size": 4, "max_prompt_tokens": 8, "max_response_tokens": 20},
    "reward": {"answer": 1.0, "steps": "rewards.py:steps"},
    "optimizer": {"lr": 1e-6},
}


def settings_of(algorithm: Any) -> Settings:
    return check_settings(BASE | {"algorithm": algorithm}, "test.yaml")


def write_settings(tmp_path: Path, algorithm: Any) -> Path:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(BASE | {"algorithm": algorithm}))
    return file


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_s_name_sets_every_part_and_the_resolved_file_lists_them(name: str, tmp_path: Path) -> None:
    settings = settings_of(name)
    assert settings.algorithm.preset == name
    assert settings == settings_of({"preset": name})
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_settings(settings))
    assert load_settings(file) == settings
    expected = PRESETS[name].settings["algorithm"]
    actual = settings.algorithm.model_dump()
    assert {key: _common(actual[key], value) for key, value in expected.items()} == expected


def _common(actual: Any, expected: Any) -> Any:
    if isinstance(actual, dict) and isinstance(expected, str):
        return actual["path"]  # of a teacher, which a preset names by its path alone
    return {key: _common(actual[key], expected[key]) for key in expected} if isinstance(expected, dict) else actual


SOURCES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("preset_sources.yaml").read_text())


@pytest.mark.parametrize("name", SOURCES)
def test_constants_of_the_sources(name: str) -> None:
    tree = {key: value for key, value in BASE.items() if key != "optimizer"}
    optimizer = {} if name.startswith("r1") else BASE["optimizer"]
    settings = check_settings(tree | {"optimizer": optimizer, "algorithm": name}, "test.yaml")
    actual = settings.model_dump()
    for path, expected in SOURCES[name].items():
        part = reduce(getitem, path.split("."), actual)
        assert _common(part, expected) == expected, path


def test_the_user_s_settings_override_the_preset_s(tmp_path: Path) -> None:
    settings = settings_of({"preset": "dapo", "clip": {"high": 0.5}})
    assert (settings.algorithm.clip.low, settings.algorithm.clip.high) == (0.2, 0.5)
    file = write_settings(tmp_path, {"preset": "grpo", "kl": {"coef": 0.1}})
    assert load_settings(file, ["algorithm.preset=dapo"]).algorithm.kl.coef == 0.1
    assert load_settings(file, ["algorithm=dapo"]).algorithm.kl.coef == 0.0
    named = load_settings(write_settings(tmp_path, "dapo"), ["algorithm.clip.high=0.4"]).algorithm
    assert (named.preset, named.clip.high, named.aggregation) == ("dapo", 0.4, "token_mean")


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"kl": {"coef": 0.1, "estimator": "k1"}}, "set kl.estimator=k3_unbiased or k2, or kl.apply_to=reward"),
        ("dappo", "unknown preset 'dappo' (did you mean dapo?); there are: grpo, "),
        (
            {"policy_loss": "clipp"},
            "algorithm.policy_loss: unknown policy loss 'clipp' (did you mean clip?): there are clip, cispo, ",
        ),
        ({"advantage": {"combine": "normalize"}, "kl": {"coef": 1, "apply_to": "reward"}}, "set kl.apply_to=loss"),
        ({"kl": {"coef": 1, "level": "sequence", "estimator": "k3_unbiased"}}, "ratio=product"),
        (
            {"preset": "otb", "ratio": "sequence"},
            "advantage.baseline=optimal_token differs by token, ratio=sequence does",
        ),
        ({"preset": "otb", "advantage": {"combine": "normalize"}}, "leave out advantage.estimator, level and combine"),
        ({"preset": "dr_grpo", "advantage": {"combine": "normalize"}}, "and advantage.scale=group_std"),
        ({"advantage": {"combine": "normalize", "baseline": "leave_one_out"}}, "normalizes each reward in its group"),
        ({"rollout_correction": {"kind": "mask"}}, "has no limit: set rollout_correction.high"),
        ({"kl": {"ref_update_every": 5}}, "need a reference: set kl.coef above 0"),
        ({"policy_loss": "vespo", "ratio": "sequence"}, "set ratio=token"),
        ({"preset": "gspo", "advantage": {"level": "process"}}, "or sequence_token"),
        ({"old_logprobs": "engine", "rollout_correction": {"kind": "mask", "high": 2}}, "leaves nothing to correct"),
        ({"preset": "reinforce_pp", "filter": {"zero_std": "drop"}}, "filter.zero_std looks at groups"),
        ({"preset": "reinforce_pp", "advantage": {"scale": "group_mean"}}, "scale=group_mean needs a group baseline"),
        (
            {"rollout_correction": "decoupled_geo"},
            "unknown correction 'decoupled_geo' (did you mean decoupled_geo_rs?)",
        ),
        ({"rollout_correction": {"masks": {"seq_max_k1": 2.0}}}, "algorithm.rollout_correction.masks.seq_max_k1"),
        ({"rollout_correction": {"masks": {"seq_mean_k1": [1.1, 0.9]}}}, "seq_mean_k1=[1.1, 0.9]: give two limits"),
        ({"rollout_correction": {"masks": {"token_k2": -1}}}, "algorithm.rollout_correction.masks.token_k2"),
    ],
)
def test_contradictions(algorithm: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        settings_of(algorithm)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_s_name_sets_its_parts_under_the_user_s_settings(name: str, tmp_path: Path) -> None:
    algorithm = settings_of({"preset": "dapo", "rollout_correction": name}).algorithm
    parts = {"rollout_correction": {}} | CORRECTIONS[name]
    assert algorithm == settings_of({"preset": "dapo"} | parts).algorithm
    assert algorithm != settings_of("dapo").algorithm
    file = write_settings(tmp_path, {"preset": "dapo", "old_logprobs": "recomputed"})
    own = load_settings(file, [f"algorithm.rollout_correction={name}"]).algorithm
    assert (own.old_logprobs, own.rollout_correction) == ("recomputed", algorithm.rollout_correction)


def test_one_limit_of_a_mask_is_a_pair() -> None:
    masks = settings_of({"rollout_correction": {"masks": {"token_k1": 1.25, "seq_max_k3": 0.1}}}).algorithm
    assert masks.rollout_correction.masks == {"token_k1": (0.8, 1.25), "seq_max_k3": (0.0, 0.1)}


def test_a_group_of_one_needs_no_baseline() -> None:
    single = {"rollout": BASE["rollout"] | {"group_size": 1}}
    with pytest.raises(UserError, match="nothing to compare with: set 2 or more, or algorithm: reinforce_pp"):
        check_settings(BASE | single, "test.yaml")
    for algorithm in ("reinforce_pp", {"advantage": {"estimator": "my.py:own"}}):
        assert check_settings(BASE | single | {"algorithm": algorithm}, "test.yaml").rollout.group_size == 1


SNIPPETS = re.findall(r"`([a-z_]+: [^`]*)`", algorithms_page())


@pytest.mark.parametrize("snippet", [snippet for snippet in SNIPPETS if not snippet.startswith("algorithm")])
def test_every_part_in_the_readme_can_be_set(snippet: str) -> None:
    tree = yaml.safe_load(snippet)
    kl = {"coef": 0.1} | tree.pop("kl", {})
    assert AlgorithmConfig.model_validate({"kl": kl} | tree)
