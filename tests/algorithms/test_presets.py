"""Presets are data laid under the user's settings; parts that contradict each other are refused with a way out."""

import re
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
    return {key: actual[key] for key in expected} if isinstance(expected, dict) else actual


# Written from the sources, not from presets.yaml: setting by setting what each says, by the paths of the settings file.
SOURCES: dict[str, dict[str, Any]] = {
    # DAPO, section 4.1: eps 0.2 and 0.28, no KL; eq. 8: token mean; eq. 11: accuracy; eq. 13: -1 where rewards are +-1
    "dapo": {
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.28,
        "algorithm.aggregation": "token_mean",
        "algorithm.kl.coef": 0.0,
        "algorithm.filter.zero_std": "refill",
        "algorithm.filter.metric": "accuracy",
        "reward.overlong.weight": 1.0,
    },
    # scripts/rl/thinkless_1.5b_deepscaler.sh: std_normalizer, kl_loss_coef, kl_loss_type
    "degrpo": {
        "algorithm.advantage.scale": "none",
        "algorithm.kl.coef": 0.001,
        "algorithm.kl.estimator": "k3_clamped",
    },
    # section 5.1
    "gspo": {
        "algorithm.ratio": "sequence",
        "algorithm.clip.low": 3e-4,
        "algorithm.clip.high": 4e-4,
        "algorithm.aggregation": "sequence_mean",
    },
    "gspo_token": {"algorithm.ratio": "sequence_token", "algorithm.clip.low": 3e-4, "algorithm.clip.high": 4e-4},
    # section 5.1, as in TRL's index of papers
    "luspo": {"algorithm.ratio": "sequence", "algorithm.clip.low": 2e-3, "algorithm.clip.high": 2.5e-3},
    # section 3.2: neither std nor length
    "dr_grpo": {"algorithm.advantage.scale": "none", "algorithm.aggregation": "constant", "algorithm.kl.coef": 0.0},
    # TRL's RLOOConfig: beta, epsilon, k1 in the reward, ratio of whole completions
    "rloo": {
        "algorithm.ratio": "product",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.kl.coef": 0.05,
        "algorithm.kl.estimator": "k1",
        "algorithm.kl.apply_to": "reward",
    },
    # OpenRLHF's train_reinforce_baseline_hybrid_engine.sh: init_coef, estimator, use_loss
    "reinforce_pp_baseline": {
        "algorithm.kl.coef": 1e-5,
        "algorithm.kl.estimator": "k2",
        "algorithm.kl.apply_to": "loss",
    },
    # the list in DeepSWE's report
    "grpo_pp": {
        "algorithm.clip.high": 0.28,
        "algorithm.kl.coef": 0.0,
        "algorithm.advantage.scale": "none",
        "algorithm.advantage.baseline": "leave_one_out",
        "algorithm.aggregation": "constant",
        "algorithm.filter.truncated": "mask",
        "algorithm.entropy.coef": 0.0,
    },
    # R1-Zero: 8,192 outputs at random in 16 mini-batches, a new reference every 400 updates
    "r1_zero": {
        "training.shuffle": True,
        "training.updates_per_step": 16,
        "training.epochs": 1,
        "optimizer.lr": 3e-6,
        "algorithm.kl.coef": 0.001,
        "algorithm.kl.ref_update_every": 400 // 16,
        "algorithm.clip.high": 0.2,
    },
    # first stage of RL of R1: the clip ratio of 10 is its own
    "r1": {"training.shuffle": True, "algorithm.clip.high": 10.0, "algorithm.kl.ref_update_every": 25},
}


@pytest.mark.parametrize("name", SOURCES)
def test_constants_of_the_sources(name: str) -> None:
    tree = {key: value for key, value in BASE.items() if key != "optimizer"}
    optimizer = {} if name.startswith("r1") else BASE["optimizer"]
    settings = check_settings(tree | {"optimizer": optimizer, "algorithm": name}, "test.yaml")
    for path, value in SOURCES[name].items():
        actual: Any = settings
        for part in path.split("."):
            actual = vars(actual)[part]
        assert actual == value, path


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
