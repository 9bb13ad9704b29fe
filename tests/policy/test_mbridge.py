"""mbridge maps Megatron's parameters to the same Hugging Face tensors as grpo_mp."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import unfuse
from tools.tiny.models import make_tiny, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Apex is not installed")
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mixtral", "glm4_moe", "deepseek_v3")


@pytest.mark.usefixtures("parallel")
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_equal_mbridge(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mbridge import AutoBridge  # after platform.prepare()
    from mbridge.models import DeepseekV3Bridge

    # Its DeepSeek-V3 config is for another Megatron version; the names do not depend on it.
    monkeypatch.setattr(DeepseekV3Bridge, "TransformerConfigClass", SimpleNamespace)

    make_tiny(tmp_path, family, make_tokenizer(["apples"]), num_hidden_layers=2)
    hf = HfConfig.read(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.rope_theta = hf.rope["rope_theta"]  # transformers 5 moved it
    bridge = AutoBridge.from_config(config)
    for name, param in family_of(hf).params(hf).items():
        if param.alias:
            continue
        weight = torch.randn(param.local_shape(1))
        expected = dict(zip(*bridge._weight_to_hf_format(name, weight), strict=True))
        actual = dict(zip(param.hf, unfuse(param, weight), strict=True))
        assert actual.keys() == expected.keys()
        assert all(torch.equal(expected[hf_name], tensor) for hf_name, tensor in actual.items()), name
