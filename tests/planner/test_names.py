"""Published names find their config: its parameters are those that the publisher's files hold."""

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
    published_models,
    published_name,
)
from grpo_mp.planner.parameter_count import local_parameter_counts
from grpo_mp.utils.errors import UserError

# Elements of the tensors in the publisher's files, without multi-token prediction and router biases.
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B-Thinking-2507": 30_532_122_624,
    "Qwen3-235B-A22B-Instruct-2507": 235_093_634_560,
    "Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-72B": 72_706_203_648,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Llama-3.1-405B": 405_853_388_800,
    "deepseek-math-7b-rl": 6_910_365_696,
    "DeepSeek-V2-Lite-Chat": 15_706_484_224,
    "DeepSeek-V2-Chat": 235_741_434_880,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "DeepSeek-V3.1": 671_026_404_352,
    "MiniMax-M2.5": 228_689_748_992,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# Published with a factor of its rotary embedding that only engines read.
REFUSED = ("DeepSeek-R1-0528-Qwen3-8B",)


def parameters(name: str) -> int:
    hf = named_config(name)
    (count,) = local_parameter_counts(hf, LayoutConfig(), (tuple(range(hf.int("num_hidden_layers"))),))
    return count.total


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_has_the_parameters_of_the_publishers_files(name: str) -> None:
    assert parameters(name) == PARAMETERS[name]


def test_every_name_is_there_once_and_of_a_supported_family() -> None:
    entries = yaml.safe_load(NAMES.read_text())
    counts = Counter(name.lower() for entry in entries for name in entry["names"])
    assert set(counts.values()) == {1}
    assert {entry["config"] for entry in entries} == {file.stem for file in PUBLISHED.glob("*.json")}
    assert {named_config(name).model_type for name in published_models()} == set(FAMILIES)
    for name in set(published_models()) - set(REFUSED):
        assert family_of(named_config(name)).config(named_config(name))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("checkpoints/DeepSeek-R1", "DeepSeek-R1"),
        ("zai-org/GLM-4.6-FP8", "GLM-4.6"),
        ("/models/qwen3-coder-30b-a3b-instruct", "Qwen3-Coder-30B-A3B-Instruct"),
        ("checkpoints/DeepSeek-R1-BF16", "DeepSeek-R1"),
    ],
)
def test_a_folder_is_found_by_its_name(path: str, name: str) -> None:
    hf, source = find_config(Path(path))
    assert hf.values == named_config(name).values
    assert f"the published {name} " in source


def test_an_unknown_name_lists_the_nearest() -> None:
    assert published_name("DeepSeek-R2") is None
    with pytest.raises(UserError, match=r"nearest known: .*DeepSeek-R1, .*: give a config.json with --model-config"):
        find_config(Path("deepseek-ai/DeepSeek-R2"))
