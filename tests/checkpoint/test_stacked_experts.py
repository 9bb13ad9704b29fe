"""GPT-OSS in MXFP4, as it is released: read and converted as transformers dequantizes it, and written in bfloat16."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from grpo_mp.checkpoint.convert import to_hf, to_megatron
from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_layout import engine_format, is_fp8_checkpoint, precision_arguments
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import no_progress
from tools.tiny.models import make_tiny, make_tokenizer

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A folder with random blocks and scales, and what transformers makes of its tensors."""
    folder = tmp_path_factory.mktemp("mxfp4")
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    make_tiny(folder, "gpt_oss", make_tokenizer(["apples"]), **shape)
    expected = load_file(folder / "model.safetensors")
    stored = {}
    torch.manual_seed(0)
    for name, tensor in expected.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            expected[name] = stored[name] = tensor.bfloat16()
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 131, (experts, rows, columns // 32), dtype=torch.uint8)
        # Beyond what bfloat16 holds exactly, and almost infinite
        scales[0, 0, 0] = 0
        scales[0, 1, 0] = 250
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, expected


def test_experts_are_those_of_transformers(released: tuple[Path, Tensors]) -> None:
    folder, expected = released
    gate_up = expected[f"{EXPERTS}.gate_up_proj"]
    down = expected[f"{EXPERTS}.down_proj"]
    with HfReader(folder) as reader:
        for expert in range(8):
            own = {part: reader.read(f"{EXPERTS}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
            assert torch.equal(own["gate"], gate_up[expert, :, 0::2].T)
            assert torch.equal(own["up"], gate_up[expert, :, 1::2].T)
            assert torch.equal(own["down"], down[expert].T)
        assert torch.equal(reader.read(f"{EXPERTS}.3.up_proj.bias"), expected[f"{EXPERTS}.gate_up_proj_bias"][3, 1::2])


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 32), (5, 6), (31, 65), (40, 64)])
@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_a_slice_is_part_of_the_whole(released: tuple[Path, Tensors], part: str, start: int, stop: int) -> None:
    """Also where it cuts blocks."""
    with HfReader(released[0]) as reader:
        name = f"{EXPERTS}.5.{part}_proj.weight"
        whole = reader.read(name)
        assert torch.equal(reader.read(name, 0, start, min(stop, len(whole))), whole[start:stop])
        assert torch.equal(reader.read(name, 1, start, min(stop, whole.shape[1])), whole[:, start:stop])


def test_a_conversion_there_and_back_is_the_model_in_bfloat16(released: tuple[Path, Tensors], tmp_path: Path) -> None:
    folder, expected = released
    to_megatron(folder, tmp_path / "megatron", no_progress, 100_000)
    to_hf(tmp_path / "megatron", tmp_path / "back", None, False, no_progress, 100_000)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert len(files) > 2


def test_engines_compute_in_bfloat16(released: tuple[Path, Tensors]) -> None:
    hf = HfConfig.read(released[0])
    for cpu in (False, True):
        assert not engine_format({}, hf, cpu)
        assert json.loads(precision_arguments({}, hf, cpu)["json_model_override_args"]) == {"quantization_config": None}
    assert not is_fp8_checkpoint(hf)
    assert family_of(hf).stacks_experts
    with pytest.raises(UserError, match="SGLang loads no gpt_oss in blockwise FP8: leave it out"):
        engine_format({"quantization": "fp8"}, hf, cpu=False)


def test_a_conversion_to_fp8_is_refused(released: tuple[Path, Tensors], tmp_path: Path) -> None:
    to_megatron(released[0], tmp_path / "megatron", no_progress)
    with pytest.raises(UserError, match="nothing reads gpt_oss in blockwise FP8"):
        to_hf(tmp_path / "megatron", tmp_path / "fp8", None, True, no_progress)
    assert not (tmp_path / "fp8.incomplete").exists()
