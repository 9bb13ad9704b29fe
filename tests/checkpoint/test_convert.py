"""Hugging Face -> torch_dist -> Hugging Face is exact; conversions resume, and refuse wrong inputs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.compare import compare_weights
from grpo_mp.checkpoint.convert import RECORD, to_hf, to_megatron
from grpo_mp.checkpoint.hf_reader import INDEX, HfReader
from grpo_mp.models.fp8 import FP8, SCALE, quantize
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import no_progress
from tools.tiny.models import make_tiny, make_tokenizer

TINY: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
CASES: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("qwen3", {"tie_word_embeddings": True}, torch.float32),
    ("qwen3_moe", {"mlp_only_layers": [1], "num_experts": 4}, torch.bfloat16),
    ("deepseek_v3", {"first_k_dense_replace": 2, "n_shared_experts": 2}, torch.bfloat16),
]
PART_BYTES = 100_000  # several parts; layers and experts of one tensor fall into different ones


def make_model(folder: Path, family: str = "deepseek_v3", dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    make_tiny(folder, family, make_tokenizer(["apples"]), **TINY | shape)
    tensors = load_file(folder / "model.safetensors")
    cast = {name: tensor if "bias" in name else tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_fp8_model(folder: Path) -> Path:
    """As R1 is released: projections in FP8 (with blocks below 448), a layer of multi-token prediction."""
    make_model(folder, dtype=torch.bfloat16, hidden_size=160, intermediate_size=300)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" in name:
            weight, scale = quantize(tensor)
            tensors |= {name: weight, name + SCALE: scale}
            weight.view(torch.uint8)[:128][(weight.view(torch.uint8)[:128] & 0x78) == 0x78] &= 0xBF
        else:
            tensors[name] = tensor
    extra = {"model.layers.3.eh_proj.weight": quantize(torch.randn(130, 140))[0]}
    extra |= {"model.layers.3.eh_proj.weight" + SCALE: torch.rand(2, 2), "model.layers.3.norm.weight": torch.ones(3)}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def aux_files(folder: Path) -> dict[str, bytes]:
    records = (INDEX, RECORD)
    files = (file for file in folder.iterdir() if file.suffix != ".safetensors" and file.name not in records)
    config = json.loads((folder / "config.json").read_text())
    return {file.name: file.read_bytes() for file in files} | {"config.json": json.dumps(config).encode()}


@pytest.mark.parametrize(("family", "shape", "dtype"), CASES)
def test_round_trip_is_exact(family: str, shape: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, dtype, **shape)
    to_megatron(model, tmp_path / "megatron", no_progress, PART_BYTES)
    assert len(list((tmp_path / "megatron").glob("part_*"))) > 1
    to_hf(tmp_path / "megatron", tmp_path / "back", None, False, no_progress, PART_BYTES)
    assert compare_weights(HfReader(model), HfReader(tmp_path / "back")) == []
    assert aux_files(tmp_path / "back") == aux_files(model)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    tensors = load_file(model / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "back" / file)[name], tensors[name])


def test_fp8_round_trip_with_the_source_is_exact(tmp_path: Path) -> None:
    model = make_fp8_model(tmp_path / "model")
    to_megatron(model, tmp_path / "megatron", no_progress, PART_BYTES)
    to_hf(tmp_path / "megatron", tmp_path / "back", None, True, no_progress)
    assert compare_weights(HfReader(model), HfReader(tmp_path / "back")) == []
    assert aux_files(tmp_path / "back") == aux_files(model)


def test_fp8_becomes_bfloat16_and_is_quantized_again_without_the_source(tmp_path: Path) -> None:
    model = make_fp8_model(tmp_path / "model")
    like = tmp_path / "like"
    to_megatron(model, tmp_path / "megatron", no_progress)
    to_hf(tmp_path / "megatron", tmp_path / "wide", None, False, no_progress)
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())
    like.mkdir()
    shutil.copy(model / "config.json", like)
    to_hf(tmp_path / "megatron", tmp_path / "narrow", like, True, no_progress)
    assert "quantization_config" in json.loads((tmp_path / "narrow" / "config.json").read_text())
    with HfReader(model) as old, HfReader(tmp_path / "wide") as wide, HfReader(tmp_path / "narrow") as narrow:
        assert wide.names == old.names
        assert narrow.names == {name for name in old.names if ".layers.3." not in name}  # not part of the policy
        for name in wide.names:
            assert wide.dtype(name) == (torch.bfloat16 if old.dtype(name) == FP8 else old.dtype(name))
            assert torch.equal(wide.read(name), old.read(name))
        for name in narrow.names:
            assert narrow.dtype(name) == old.dtype(name)
            torch.testing.assert_close(narrow.read(name), old.read(name), rtol=2**-3, atol=1e-4)


class MachineDiedError(Exception):
    """A machine went away."""


def die_after(parts: int) -> Callable[[int, int], None]:
    """Progress callback that raises after so many parts."""
    calls: list[int] = []

    def report_progress(written: int, total: int) -> None:
        calls.append(written)
        if len(calls) == parts:
            raise MachineDiedError

    return report_progress


def test_a_second_start_resumes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    megatron = tmp_path / "megatron"
    back = tmp_path / "back"
    for convert in (
        lambda progress: to_megatron(model, megatron, progress, PART_BYTES),
        lambda progress: to_hf(megatron, back, None, False, progress, PART_BYTES),
    ):
        final = back if megatron.exists() else megatron
        with pytest.raises(MachineDiedError):
            convert(die_after(1))
        assert not final.exists()
        reports: list[tuple[int, int]] = []
        convert(lambda written, total, reports=reports: reports.append((written, total)))
        assert sum(written for written, _ in reports) == reports[0][1]
        parts = [*final.glob("part_*"), *final.glob("model-*")]
        assert len(reports) == len(parts) - 1
        convert(die_after(1))  # complete: nothing is written
    assert compare_weights(HfReader(model), HfReader(back)) == []


def test_an_unfinished_part_is_written_again(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    megatron = tmp_path / "megatron"
    with pytest.raises(MachineDiedError):
        to_megatron(model, megatron, die_after(2), PART_BYTES)
    incomplete = tmp_path / "megatron.incomplete"
    (incomplete / "part_00000").rename(incomplete / "unfinished_part_00000")
    (incomplete / ".tmpAbc").write_text("as safetensors writes before it renames")
    to_megatron(model, megatron, no_progress, PART_BYTES)
    assert not [*megatron.glob("unfinished*"), *megatron.glob(".tmp*")]
    to_hf(megatron, tmp_path / "back", None, False, no_progress)
    assert compare_weights(HfReader(model), HfReader(tmp_path / "back")) == []


def test_another_model_is_not_overwritten(tmp_path: Path) -> None:
    model = make_model(tmp_path / "one")
    other = make_model(tmp_path / "other", "qwen3")
    final = tmp_path / "final"
    with pytest.raises(MachineDiedError):
        to_megatron(model, final, die_after(1), PART_BYTES)
    with pytest.raises(UserError, match=r"final.incomplete is of another conversion, or of none: choose another dest"):
        to_megatron(other, final, no_progress, PART_BYTES)
    to_megatron(model, final, no_progress, PART_BYTES)
    (model / "model.safetensors").touch()
    for changed in (other, model):
        with pytest.raises(UserError, match=r"final is of another conversion, or of none: choose another destination"):
            to_megatron(changed, final, no_progress, PART_BYTES)


def test_layers_that_the_config_does_not_count_are_refused(tmp_path: Path) -> None:
    """Unless multi-token prediction counts them."""
    model = make_model(tmp_path / "model")
    to_megatron(model, tmp_path / "megatron", no_progress)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 2, "layer_types": None}
    (model / "config.json").write_text(json.dumps(config))
    message = r"num_hidden_layers=2 and num_nextn_predict_layers=0 do not cover model.layers.2.\S+: set them"
    with pytest.raises(UserError, match=message):
        to_megatron(model, tmp_path / "final", no_progress)
    with pytest.raises(UserError, match=r"holds other tensors, such as decoder.layers.2.\S+, which the model in"):
        to_hf(tmp_path / "megatron", tmp_path / "back", None, False, no_progress)
    assert not (tmp_path / "back").exists()
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    to_megatron(model, tmp_path / "final", no_progress)


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "1 tensors are missing, the first is model.norm.weight"),
        ("model.nrom.weight", torch.ones(1), "the mapping of deepseek_v3 does not know the tensor model.nrom.weight"),
        ("model.norm.weight", torch.ones(31), r"model.norm.weight has shape \[31\], config.json says \[32\]"),
        ("model.norm.weight", torch.full((32,), float("nan")), "the tensor model.norm.weight holds NaN"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(48, 32).half(), "different dtypes, but are one parameter"),
    ],
)
def test_wrong_tensors_are_refused(name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    change_tensors(make_model(tmp_path / "model"), **{name: tensor})
    with pytest.raises(UserError, match=message):
        to_megatron(tmp_path / "model", tmp_path / "final", no_progress)
    assert not (tmp_path / "final").exists()


def test_wrong_checkpoints_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    megatron = tmp_path / "megatron"
    with pytest.raises(UserError, match="is neither a run's checkpoint nor a torch_dist checkpoint"):
        to_hf(model, tmp_path / "back", model, False, no_progress)
    to_megatron(model, megatron, no_progress)
    with pytest.raises(UserError, match=r"holds other tensors, such as"):
        to_hf(megatron, tmp_path / "back", make_model(tmp_path / "other", "qwen3"), False, no_progress)
    with pytest.raises(UserError, match=r"has shape \[\d+, 32\], config.json says \[\d+, 64\]"):
        to_hf(megatron, tmp_path / "back", make_model(tmp_path / "wide", hidden_size=64), False, no_progress)
