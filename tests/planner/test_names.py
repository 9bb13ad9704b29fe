"""Published names find their config: its parameters are those that the publisher's files hold."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.models.families import FAMILIES, family_of
from grpo_mp.planner.model_configs import (
    NAMES,
    PUBLISHED,
    find_config,
    named_config,
    published_name,
    published_names,
)
from grpo_mp.planner.parameter_count import local_parameter_counts
from grpo_mp.utils.errors import UserError

# Elements of the tensors in the publisher's files, without multi-token prediction and router biases.
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B-Thinking-2507": 30_532_122_624,
    "Qwen3-235B-A22B-Instruct-2507": 235_093_634_560,
    "Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-2-13b-hf": 13_015_864_320,
    "Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "Qwen1.5-0.5B": 463_987_712,
    "Qwen1.5-1.8B-Chat": 1_836_828_672,
    "Qwen1.5-4B": 3_950_369_280,
    "Qwen1.5-7B-Chat": 7_721_324_544,
    "Qwen1.5-14B": 14_167_290_880,
    "Qwen1.5-32B-Chat": 32_512_218_112,
    "Qwen1.5-72B": 72_287_920_128,
    "Qwen1.5-110B-Chat": 111_209_914_368,
    "CodeQwen1.5-7B": 7_250_284_544,
    "deepseek-math-7b-rl": 6_910_365_696,
    "deepseek-llm-67b-base": 67_425_001_472,
    "CodeLlama-7b-hf": 6_738_546_688,
    "CodeLlama-34b-Instruct-hf": 33_743_970_304,
    "DeepSeek-V2-Lite-Chat": 15_706_484_224,
    "DeepSeek-V2-Chat": 235_741_434_880,
    "DeepSeek-V3.1": 671_026_404_352,
}
# What the publishers list, as families of names; braces hold alternatives, the first of which may be empty.
PUBLISHED_NAMES = """
DeepSeek-V3{,-Base,-0324,.1,.1-Base,.1-Terminus} DeepSeek-R1{,-Zero,-0528,-0528-Qwen3-8B}
DeepSeek-R1-Distill-{Qwen-1.5B,Qwen-7B,Qwen-14B,Qwen-32B,Llama-8B,Llama-70B} DeepSeek-Prover-V2-671B
DeepSeek-V2{,-Chat,-Chat-0628,-Lite,-Lite-Chat,.5,.5-1210}
DeepSeek-Coder-V2-{Base,Instruct,Instruct-0724,Lite-Base,Lite-Instruct} DeepSeek-Prover-V1{,.5-Base,.5-SFT,.5-RL}
deepseek-math-7b-{base,instruct,rl} deepseek-llm-7b-{base,chat} deepseek-llm-67b-{base,chat}
deepseek-coder-7b-{base,instruct}-v1.5
Kimi-K2-{Base,Instruct,Instruct-0905,Thinking} Kimi-Dev-72B Moonlight-16B-A3B{,-Instruct}
GLM-4.5{,-Base,-Air,-Air-Base} GLM-4.6 GLM-4.7
Qwen3-{0.6B,1.7B,4B,8B,14B,30B-A3B}{,-Base} Qwen3-32B Qwen3-4B-SafeRL Qwen3-235B-A22B
Qwen3-{4B,30B-A3B,235B-A22B}-{Instruct,Thinking}-2507 Qwen3-Coder-{30B-A3B,480B-A35B}-Instruct Qwen3-Coder-480B-A35B
Qwen2.5-{0.5B,1.5B,3B,7B,14B,32B,72B}{,-Instruct} Qwen2.5-{7B,14B}-Instruct-1M
Qwen2.5-Coder-{0.5B,1.5B,3B,7B,14B,32B}{,-Instruct} Qwen2.5-Math-{1.5B,7B,72B}{,-Instruct} QwQ-32B{,-Preview}
Qwen2-{0.5B,1.5B,7B,72B}{,-Instruct} Qwen2-Math-{1.5B,7B,72B}{,-Instruct}
Qwen1.5-{0.5B,1.8B,4B,7B,14B,32B,72B,110B}{,-Chat} CodeQwen1.5-7B{,-Chat}
Llama-3.2-{1B,3B}{,-Instruct} Llama-3.3-70B-Instruct {,Meta-}Llama-3.1-{8B,70B,405B}{,-Instruct}
Meta-Llama-3-{8B,70B}{,-Instruct} Llama-2-{7b,13b,70b}{,-chat}-hf CodeLlama-{7b,13b,34b}{,-Python,-Instruct}-hf
Mixtral-8x{7B,22B}{,-Instruct}-v0.1
"""
# Published with a rotary embedding that no trainable model of its family has.
REFUSED = ("DeepSeek-R1-0528-Qwen3-8B",)
SIZE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)[bB](?:-|$)")


def alternatives(pattern: str) -> list[str]:
    """Write out the first braces of a pattern, then the others."""
    match = re.search(r"{(.*?)}", pattern)
    if not match:
        return [pattern]
    return [
        name
        for word in match[1].split(",")
        for name in alternatives(pattern[: match.start()] + word + pattern[match.end() :])
    ]


def parameters(name: str) -> int:
    hf = named_config(name)
    (count,) = local_parameter_counts(hf, LayoutConfig(), (tuple(range(hf.int("num_hidden_layers"))),))
    return count.total


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_has_the_parameters_of_the_publishers_files(name: str) -> None:
    assert parameters(name) == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in published_names() if SIZE.search(name) and "x" not in name])
def test_size_in_a_name_is_that_of_its_config(name: str) -> None:
    match = SIZE.search(name)
    assert match
    assert parameters(name) == pytest.approx(float(match[2]) * 1e9, rel=0.25)


def test_every_name_is_there_once_and_of_a_supported_family() -> None:
    entries = yaml.safe_load(NAMES.read_text())
    counts = Counter(name.lower() for entry in entries for name in entry["names"])
    assert set(counts.values()) == {1}
    assert {entry["config"] for entry in entries} == {file.stem for file in PUBLISHED.glob("*.json")}
    assert {named_config(name).model_type for name in published_names()} == set(FAMILIES)
    for name in set(published_names()) - set(REFUSED):
        assert family_of(named_config(name)).config(named_config(name))


def test_every_published_folder_is_known_by_its_name() -> None:
    names = [name for pattern in PUBLISHED_NAMES.split() for name in alternatives(pattern)]
    assert len(names) > 180
    assert [name for name in names if published_name(name) != name] == []


def test_a_folder_that_cannot_be_trained_says_why_when_it_is_planned() -> None:
    for name in REFUSED:
        with pytest.raises(UserError, match=rf"{name}.*rope type 'yarn' is not supported"):
            family_of(named_config(name)).config(named_config(name))


def test_a_difference_changes_a_value_that_the_config_has() -> None:
    for entry in yaml.safe_load(NAMES.read_text()):
        plain = named_config(entry["names"][0]).values
        assert not entry.get("differs", {}).keys() - plain.keys()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("checkpoints/DeepSeek-R1", "DeepSeek-R1"),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-R1-0528"),
        ("DeepSeek-V3.1", "DeepSeek-V3.1"),
        ("moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2-Instruct-0905"),
        ("Kimi-K2-Thinking", "Kimi-K2-Thinking"),
        ("zai-org/GLM-4.6-FP8", "GLM-4.6"),
        ("/models/qwen3-coder-30b-a3b-instruct", "Qwen3-Coder-30B-A3B-Instruct"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "Qwen3-235B-A22B-Thinking-2507"),
        ("checkpoints/DeepSeek-R1-BF16", "DeepSeek-R1"),
    ],
)
def test_a_folder_is_found_by_its_name(path: str, name: str) -> None:
    hf, source = find_config(Path(path))
    assert hf.values == named_config(name).values
    assert f"the published {name} " in source


def test_contexts_differ_where_the_publishers_do() -> None:
    limits = {name: named_config(name).int("max_position_embeddings") for name in published_names()}
    assert limits["Qwen3-30B-A3B"] == 40960 < limits["Qwen3-30B-A3B-Instruct-2507"] == 262144
    assert limits["Kimi-K2-Instruct"] == 131072 < limits["Kimi-K2-Instruct-0905"] == 262144
    assert named_config("Kimi-K2-Instruct-0905").rope_float("factor") == 64
    assert limits["GLM-4.5"] == 131072 < limits["GLM-4.6"]


def test_an_unknown_name_lists_the_nearest() -> None:
    assert published_name("DeepSeek-R2") is None
    with pytest.raises(UserError, match=r"nearest known: .*DeepSeek-R1, .*: give a config.json with --model-config"):
        find_config(Path("deepseek-ai/DeepSeek-R2"))
