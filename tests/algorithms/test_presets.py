"""Presets are data laid under the user's settings; parts that contradict each other are refused with a way out."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.algorithms.page import PAGE, markdown
from grpo_mp.algorithms.presets import PRESETS, with_preset
from grpo_mp.algorithms.settings import Algorithm
from grpo_mp.config import Settings, check_settings, dump_settings, load_settings
from grpo_mp.errors import UserError

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


def written(tmp_path: Path, algorithm: Any) -> Path:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(BASE | {"algorithm": algorithm}))
    return file


@pytest.mark.parametrize("name", PRESETS)
def test_the_kl_can_be_watched_with_every_preset(name: str) -> None:
    kl = settings_of({"preset": name, "kl": {"watch_share": 0.05}}).algorithm.kl
    assert kl.measured_share == (1.0 if kl.weight else 0.05)
    assert settings_of({"preset": name, "kl": {"weight": 0, "refresh_every": 0}}).algorithm.kl.measured_share == 0


@pytest.mark.parametrize("name", PRESETS)
def test_one_word_sets_every_part_and_the_resolved_file_says_them_all(name: str, tmp_path: Path) -> None:
    settings = settings_of(name)
    assert settings.algorithm.preset == name
    assert settings == settings_of({"preset": name})
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_settings(settings))
    assert load_settings(file) == settings
    wanted = PRESETS[name].settings["algorithm"]
    found = settings.algorithm.model_dump()
    assert {key: _common(found[key], value) for key, value in wanted.items()} == wanted


def _common(found: Any, wanted: Any) -> Any:
    return {key: found[key] for key in wanted} if isinstance(wanted, dict) else found


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_names_its_source_and_its_use(name: str) -> None:
    assert len(PRESETS[name].source) > 20
    assert PRESETS[name].use.endswith(".")


def test_constants_of_the_papers() -> None:
    def part(name: str) -> Algorithm:
        return settings_of(name).algorithm

    dapo, gspo, r1 = part("dapo"), part("gspo"), part("r1")
    assert (dapo.clip.low, dapo.clip.high, dapo.aggregation, dapo.kl.weight) == (0.2, 0.28, "token_mean", 0.0)
    assert dapo.filter.no_difference == "refill"
    assert (gspo.ratio, gspo.clip.low, gspo.clip.high, gspo.aggregation) == ("sequence", 3e-4, 4e-4, "sequence_mean")
    assert (r1.clip.high, r1.kl.weight, settings_of("r1").optimizer.updates_per_step) == (10.0, 0.001, 16)
    dr = part("dr_grpo")
    assert (dr.advantage.scale, dr.aggregation, dr.kl.weight) == ("none", "constant", 0.0)


def test_the_user_s_words_win_over_the_preset_s(tmp_path: Path) -> None:
    settings = settings_of({"preset": "dapo", "clip": {"high": 0.5}})
    assert (settings.algorithm.clip.low, settings.algorithm.clip.high) == (0.2, 0.5)
    file = written(tmp_path, {"preset": "grpo", "kl": {"weight": 0.1}})
    assert load_settings(file, ["algorithm.preset=dapo"]).algorithm.kl.weight == 0.1
    assert load_settings(file, ["algorithm=dapo"]).algorithm.kl.weight == 0.0
    named = load_settings(written(tmp_path, "dapo"), ["algorithm.clip.high=0.4"]).algorithm
    assert (named.preset, named.clip.high, named.aggregation) == ("dapo", 0.4, "token_mean")


def test_settings_of_other_sections_come_with_the_preset_unless_they_are_given() -> None:
    assert with_preset({"algorithm": "r1", "rollout": {"group_size": 4}})["rollout"] == {
        "prompts_per_step": 512,
        "group_size": 4,
    }
    assert with_preset({"algorithm": "none such"})["algorithm"] == {"preset": "none such"}


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ("dappo", "unknown preset 'dappo' (did you mean dapo?); there are: grpo, "),
        ({"surrogate": "clipp"}, "algorithm.surrogate: Input should be 'clip', 'cispo'"),
        ({"ratio": "sequence", "correction": {"kind": "mask", "high": 2}}, "set correction.level=sequence"),
        ({"correction": {"kind": "mask"}}, "has no limit: set correction.high"),
        ({"correction": {"high": 2.0}}, "set it to truncate or mask"),
        ({"kl": {"refresh_every": 5}}, "need a reference: set kl.weight above 0"),
        ({"kl": {"target": 0.1}}, "need a reference: set kl.weight above 0"),
        ({"surrogate": "vespo", "ratio": "sequence"}, "set ratio=token"),
        ({"preset": "gspo", "advantage": {"level": "process"}}, "set preset=gspo_token"),
        ({"old_logprobs": "engine", "correction": {"kind": "mask", "high": 2}}, "leaves nothing to correct"),
        ({"advantage": {"baseline": "none"}}, "set advantage.scale=none or batch_std"),
        ({"preset": "rloo", "advantage": {"level": "process"}}, "needs advantage.baseline=group_mean"),
        ({"preset": "reinforce_pp", "filter": {"no_difference": "drop"}}, "filter.no_difference looks at groups"),
    ],
)
def test_contradictions(algorithm: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        settings_of(algorithm)
    assert sentence in str(refused.value)


def test_a_group_of_one_needs_no_baseline() -> None:
    one = {"rollout": BASE["rollout"] | {"group_size": 1}}
    with pytest.raises(UserError, match="nothing to compare with: set 2 or more, or algorithm: reinforce_pp"):
        check_settings(BASE | one, "test.yaml")
    assert check_settings(BASE | one | {"algorithm": "reinforce_pp"}, "test.yaml").rollout.group_size == 1


def test_step_rewards_and_process_advantages_need_each_other() -> None:
    without = BASE | {"reward": {"answer": 1.0}, "algorithm": "grpo_process"}
    with pytest.raises(UserError, match="has no step rewards: set reward\\.steps"):
        check_settings(without, "test.yaml")


def test_the_page_is_the_one_that_is_written() -> None:
    assert PAGE.read_text() == markdown()


SNIPPETS = re.findall(r"`([a-z_]+: [^`]*)`", PAGE.read_text())


@pytest.mark.parametrize("snippet", [snippet for snippet in SNIPPETS if not snippet.startswith("algorithm")])
def test_every_part_on_the_page_can_be_set(snippet: str) -> None:
    tree = yaml.safe_load(snippet)
    kl = {"weight": 0.1} | tree.pop("kl", {})
    assert Algorithm.model_validate({"kl": kl} | tree)
