"""A folder in INT4 as Kimi-K2-Thinking and K2.5 are published, packed by the compressed-tensors library."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.convert import to_hf, to_megatron
from grpo_mp.checkpoint.hf_reader import HfReader, check_model
from grpo_mp.checkpoint.hf_writer import fp8_config
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import INT4, HfConfig
from grpo_mp.rollout.engine_layout import engine_format, precision_arguments
from grpo_mp.trainer.save import export_policy
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import no_progress, policy_of
from tools.tiny.models import make_tiny, make_tokenizer

GROUP = {"targets": ["Linear"], "weights": INT4, "input_activations": None, "output_activations": None}
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
}
SCHEME = QuantizationScheme(targets=["Linear"], weights=INT4)
EXPERT = "model.layers.1.mlp.experts.3."
Library = dict[str, torch.Tensor]  # the weights as the library unpacks them


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Library]:
    folder = tmp_path_factory.mktemp("int4")
    make_tiny(folder, "kimi_k2", make_tokenizer(["apples"]), hidden_size=96, num_hidden_layers=2)
    tensors = {}
    unpacked = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".mlp.experts." not in name:
            tensors[name] = tensor if "bias" in name else tensor.bfloat16()
            continue
        weight = tensor.bfloat16()
        scale = weight.unflatten(1, (-1, 32)).abs().amax(2) / 7.5
        stored = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, SCHEME)
        unpacked[name] = PackedQuantizationCompressor.decompress(stored, SCHEME)["weight"]
        tensors |= {name.removesuffix("weight") + part: values for part, values in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return folder, unpacked


def test_weights_are_those_of_the_library(packed: tuple[Path, Library]) -> None:
    folder, unpacked = packed
    hf = HfConfig.read(folder)
    stored = load_file(folder / "model.safetensors")
    assert {f"{EXPERT}up_proj.weight_{part}" for part in ("packed", "scale", "shape")} <= stored.keys()
    with HfReader(folder) as reader:
        check_model(reader, family_of(hf).params(hf).values(), hf)
        assert len({value for name in unpacked for value in reader.read(name).unique().tolist()}) > 100
        for name, weight in unpacked.items():
            assert reader.dtype(name) == weight.dtype == torch.bfloat16
            assert torch.equal(reader.read(name), weight), name


@pytest.mark.parametrize(("start", "stop"), [(0, 32), (32, 64), (5, 9), (7, 71), (64, 96), (95, 96)])
def test_slices_are_those_of_the_whole(packed: tuple[Path, Library], start: int, stop: int) -> None:
    folder, unpacked = packed
    with HfReader(folder) as reader:
        for name, axis in ((f"{EXPERT}up_proj.weight", 1), (f"{EXPERT}down_proj.weight", 0)):
            part = unpacked[name].narrow(axis, start, stop - start)
            assert torch.equal(reader.read(name, axis, start, stop), part)


def test_an_export_has_wide_weights_and_says_so(packed: tuple[Path, Library], tmp_path: Path) -> None:
    folder, _ = packed
    with policy_of(folder, "bfloat16") as policy:
        export_policy(policy, tmp_path / "export", folder, 2**20)
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    with HfReader(tmp_path / "export") as exported, HfReader(folder) as given:
        assert exported.names == exported.stored_names == given.names
        assert all(torch.equal(exported.read(name), given.read(name)) for name in given.names)


def test_conversions_write_wide_weights_or_fp8(packed: tuple[Path, Library], tmp_path: Path) -> None:
    folder, unpacked = packed
    to_megatron(folder, tmp_path / "megatron", no_progress)
    to_hf(tmp_path / "megatron", tmp_path / "wide", None, False, no_progress)
    to_hf(tmp_path / "megatron", tmp_path / "fp8", None, True, no_progress)
    written = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert written == fp8_config(HfConfig.read(folder))
    with HfReader(tmp_path / "wide") as wide, HfReader(tmp_path / "fp8") as fp8:
        assert all(torch.equal(wide.read(name), weight) for name, weight in unpacked.items())
        assert fp8.has_fp8
        assert fp8.names == wide.names


def test_engines_compute_in_bfloat16_unless_fp8_is_set(packed: tuple[Path, Library]) -> None:
    hf = HfConfig.read(packed[0])
    assert not engine_format({}, hf, cpu=False)
    (overrides,) = precision_arguments({}, hf, cpu=True).values()
    assert json.loads(overrides) == {"quantization_config": None}
    (overrides,) = precision_arguments({"quantization": "fp8"}, hf, cpu=False).values()
    assert json.loads(overrides) == {"quantization_config": fp8_config(hf)}
    (overrides,) = precision_arguments({"quantization": "compressed-tensors"}, hf, cpu=False).values()
    assert json.loads(overrides)["quantization_config"]["config_groups"]["group_0"]["weights"] == INT4


def test_scales_of_other_groups_are_refused(packed: tuple[Path, Library], tmp_path: Path) -> None:
    tensors = load_file(packed[0] / "model.safetensors")
    scale = f"{EXPERT}up_proj.weight_scale"
    save_file(tensors | {scale: tensors[scale][:, :1].contiguous()}, tmp_path / "model.safetensors")
    words = r"scale has shape \[64, 1\], groups of 32 columns of \[64, 96\] need \[64, 3\]"
    with HfReader(tmp_path) as reader, pytest.raises(UserError, match=words):
        reader.read(f"{EXPERT}up_proj.weight")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        CONFIG | {"format": "nvfp4-pack-quantized"},
        CONFIG | {"config_groups": {"group_0": GROUP | {"weights": INT4 | {"group_size": 128}}}},
        CONFIG | {"config_groups": {"group_0": GROUP | {"weights": INT4 | {"symmetric": False}}}},
        CONFIG | {"config_groups": {}},
    ],
    ids=lambda config: f"{config['quant_method']}-{config.get('format', '')}",
)
def test_other_formats_are_refused(quantization: dict[str, Any], packed: tuple[Path, Library]) -> None:
    hf = HfConfig.read(packed[0])
    hf.values["quantization_config"] = quantization
    with pytest.raises(UserError, match=rf"config.json: its weights are quantized by '{quantization['quant_method']}'"):
        family_of(hf)
