"""Hugging Face -> torch_dist -> Hugging Face is exact; conversions resume, and refuse what they cannot do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.compare import compare_folders
from grpo_mp.checkpoint.converted_reader import open_weights
from grpo_mp.checkpoint.describe import describe_hf
from grpo_mp.checkpoint.hf_reader import INDEX, HfReader
from grpo_mp.checkpoint.manifest import RECORD
from grpo_mp.checkpoint.to_hf import to_hf
from grpo_mp.checkpoint.to_megatron import to_megatron
from grpo_mp.errors import UserError
from grpo_mp.examples.tiny_models import make_tiny
from grpo_mp.examples.tiny_tokenizer import make_tokenizer
from grpo_mp.models.fp8 import FP8, SCALE, quantise
from grpo_mp.models.hf_versions import in_both_forms

TINY: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [1], "num_experts": 4}),
    ("deepseek_v3", {"first_k_dense_replace": 2, "n_shared_experts": 2}),
]
PART_BYTES = 100_000  # several parts; layers and experts of one tensor fall into different ones


def ignore(done: int, total: int) -> None:
    """Progress that nobody watches."""


def make(folder: Path, family: str = "deepseek_v3", dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    make_tiny(folder, family, make_tokenizer(["apples"]), **TINY | shape)
    held = load_file(folder / "model.safetensors")
    cast = {name: each if "bias" in name else each.to(dtype) for name, each in held.items()}
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_fp8(folder: Path) -> Path:
    """As R1 is released: projections in FP8 (with blocks below 448), a layer of multi-token prediction."""
    make(folder, dtype=torch.bfloat16, hidden_size=160, intermediate_size=300)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" in name:
            weight, scale = quantise(tensor)
            tensors |= {name: weight, name + SCALE: scale}
            weight.view(torch.uint8)[:128][(weight.view(torch.uint8)[:128] & 0x78) == 0x78] &= 0xBF
        else:
            tensors[name] = tensor
    extra = {"model.layers.3.eh_proj.weight": quantise(torch.randn(130, 140))[0]}
    extra |= {"model.layers.3.eh_proj.weight" + SCALE: torch.rand(2, 2), "model.layers.3.norm.weight": torch.ones(3)}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def others(folder: Path) -> dict[str, bytes]:
    """Files beside the weights; a config as what is made of it has it."""
    files = (file for file in folder.iterdir() if file.suffix != ".safetensors" and file.name not in (INDEX, RECORD))
    config = in_both_forms(json.loads((folder / "config.json").read_text()))
    return {file.name: file.read_bytes() for file in files} | {"config.json": json.dumps(config).encode()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "shape"), CASES)
def test_there_and_back_is_exact(family: str, shape: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(tmp_path / "model", family, dtype, **shape)
    to_megatron(model, tmp_path / "megatron", ignore, PART_BYTES)
    assert len(list((tmp_path / "megatron").glob("part_*"))) > 1
    to_hf(tmp_path / "megatron", tmp_path / "back", None, False, ignore, PART_BYTES)
    assert compare_folders(model, tmp_path / "back") == []
    assert others(tmp_path / "back") == others(model)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    held = load_file(model / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held.values())
    assert index["weight_map"].keys() == held.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "back" / file)[name], held[name])


def test_fp8_comes_back_bit_for_bit_with_the_source(tmp_path: Path) -> None:
    model = make_fp8(tmp_path / "model")
    to_megatron(model, tmp_path / "megatron", ignore, PART_BYTES)
    to_hf(tmp_path / "megatron", tmp_path / "back", model, True, ignore)
    assert compare_folders(model, tmp_path / "back") == []
    assert others(tmp_path / "back") == others(model)


def test_fp8_becomes_bfloat16_and_fp8_again_without_the_source(tmp_path: Path) -> None:
    model = make_fp8(tmp_path / "model")
    to_megatron(model, tmp_path / "megatron", ignore)
    to_hf(tmp_path / "megatron", tmp_path / "wide", None, False, ignore)
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())
    to_hf(tmp_path / "megatron", tmp_path / "narrow", None, True, ignore)
    assert "quantization_config" in json.loads((tmp_path / "narrow" / "config.json").read_text())
    with HfReader(model) as old, HfReader(tmp_path / "wide") as wide, HfReader(tmp_path / "narrow") as narrow:
        assert wide.names == old.names
        for name in wide.names:
            assert wide.dtype(name) == (torch.bfloat16 if old.dtype(name) == FP8 else old.dtype(name))
            assert torch.equal(wide.read(name), old.read(name))
            assert narrow.dtype(name) == old.dtype(name)
            if ".layers.3." in name:  # no part of the policy: carried as it was
                assert torch.equal(narrow.read_stored(name).view(torch.uint8), old.read_stored(name).view(torch.uint8))
            torch.testing.assert_close(narrow.read(name), old.read(name), rtol=2**-3, atol=1e-4)


class MachineDiedError(Exception):
    """A machine went away."""


def dying(after: int) -> Callable[[int, int], None]:
    calls: list[int] = []

    def watch(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == after:
            raise MachineDiedError

    return watch


@pytest.mark.parametrize("after", [1, 2])
def test_a_second_start_goes_on(after: int, tmp_path: Path) -> None:
    model, megatron, back = make(tmp_path / "model"), tmp_path / "megatron", tmp_path / "back"
    for convert in (
        lambda watch: to_megatron(model, megatron, watch, PART_BYTES),
        lambda watch: to_hf(megatron, back, None, False, watch, PART_BYTES),
    ):
        final = back if megatron.exists() else megatron
        with pytest.raises(MachineDiedError):
            convert(dying(after))
        assert not final.exists()
        seen: list[tuple[int, int]] = []
        convert(lambda done, total, seen=seen: seen.append((done, total)))
        assert sum(done for done, _ in seen) == seen[0][1]
        parts = json.loads((final / RECORD).read_text())["parts"]
        assert len(seen) == len(parts) - after - 1  # while a part is watched, the next one reaches the disk
        convert(dying(1))  # whole: nothing is written
    assert compare_folders(model, back) == []


def test_a_part_that_was_changed_is_written_again(tmp_path: Path) -> None:
    model, megatron = make(tmp_path / "model"), tmp_path / "megatron"
    with pytest.raises(MachineDiedError):
        to_megatron(model, megatron, dying(2), PART_BYTES)
    file = next((tmp_path / "megatron.incomplete").glob("part_00000/*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    (tmp_path / "megatron.incomplete" / ".tmpAbc").write_text("as safetensors writes before it renames")
    to_megatron(model, megatron, ignore, PART_BYTES)
    assert not (megatron / ".tmpAbc").exists()
    to_hf(megatron, tmp_path / "back", None, False, ignore)
    assert compare_folders(model, tmp_path / "back") == []


def test_another_model_is_not_overwritten(tmp_path: Path) -> None:
    one, other, final = make(tmp_path / "one"), make(tmp_path / "other", "qwen3"), tmp_path / "final"
    with pytest.raises(MachineDiedError):
        to_megatron(one, final, dying(1), PART_BYTES)
    with pytest.raises(UserError, match=r"final.incomplete is of another conversion, or of none: choose another dest"):
        to_megatron(other, final, ignore, PART_BYTES)
    to_megatron(one, final, ignore, PART_BYTES)
    with pytest.raises(UserError, match=r"final holds something else: choose another destination"):
        to_megatron(other, final, ignore, PART_BYTES)


@pytest.mark.parametrize("destination", ["model", "model/../model", "link"])
def test_no_advice_deletes_the_source(destination: str, tmp_path: Path) -> None:
    """Where the destination is the source, or the source's name ends as unfinished work does."""
    model = make(tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    with pytest.raises(UserError, match=r"is the source of this conversion, too: choose another destination$"):
        to_megatron(model, tmp_path / destination, ignore)
    model.rename(tmp_path / "other.incomplete")
    with pytest.raises(UserError, match=r"is of another conversion, or of none: choose another destination$"):
        to_megatron(tmp_path / "other.incomplete", tmp_path / "other", ignore)
    (tmp_path / "other.incomplete").rename(model)
    to_megatron(model, tmp_path / "megatron", ignore)
    with pytest.raises(UserError, match=r"is the source of this conversion, too: choose another destination$"):
        to_hf(tmp_path / "megatron", tmp_path / "megatron", None, False, ignore)
    with pytest.raises(UserError, match=r"model holds something else: choose another destination$"):
        to_hf(tmp_path / "megatron", model, None, False, ignore)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_layers_are_counted(family: str, tmp_path: Path) -> None:
    """A layer that config.json does not count is no extra, unless multi-token prediction counts it."""
    model = make(tmp_path / "model", family)
    to_megatron(model, tmp_path / "megatron", ignore)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 2, "layer_types": None}
    for folder in (model, tmp_path / "megatron"):
        (folder / "config.json").write_text(json.dumps(config))
    words = r"num_hidden_layers=2 and num_nextn_predict_layers=0 do not cover model.layers.2.\S+: set them"
    with pytest.raises(UserError, match=words):
        to_megatron(model, tmp_path / "final", ignore)
    with pytest.raises(UserError, match=words):
        describe_hf(model)
    with pytest.raises(UserError, match=r"num_hidden_layers=2|config.json says otherwise"):
        to_hf(tmp_path / "megatron", tmp_path / "back", None, False, ignore)
    with pytest.raises(UserError, match=r"num_hidden_layers=2|config.json says otherwise"):
        open_weights(tmp_path / "megatron")
    assert not (tmp_path / "back").exists()
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    to_megatron(model, tmp_path / "final", ignore)


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    held = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in (held | changes).items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.norm.weight", None, "1 tensors are missing, the first is model.norm.weight"),
        ("model.nrom.weight", torch.ones(1), "the mapping of deepseek_v3 does not know the tensor model.nrom.weight"),
        ("model.norm.weight", torch.ones(31), r"model.norm.weight has shape \[31\], config.json says \[32\]"),
        ("model.norm.weight", torch.full((32,), float("nan")), "the tensor model.norm.weight holds NaN"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(48, 32).half(), "different dtypes, but are one parameter"),
    ],
)
def test_a_source_that_is_wrong_is_refused(name: str, tensor: torch.Tensor | None, words: str, tmp_path: Path) -> None:
    change(make(tmp_path / "model"), **{name: tensor})
    with pytest.raises(UserError, match=words):
        to_megatron(tmp_path / "model", tmp_path / "final", ignore)
    assert not (tmp_path / "final").exists()


def test_nan_in_fp8_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    model = make_fp8(tmp_path / "model")
    weight = load_file(model / "model.safetensors")[name]
    weight.view(torch.uint8)[3, 5] = 0xFF
    change(model, **{name: weight})
    with pytest.raises(UserError, match=f"the tensor {name} holds NaN"):
        to_megatron(model, tmp_path / "final", ignore)


def test_a_full_disk_is_refused_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "model")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(UserError, match=r"the disk has 5 bytes free and [\d,]+ are needed: make room first"):
        to_megatron(model, tmp_path / "final", ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_checkpoint_that_is_wrong_is_refused(tmp_path: Path) -> None:
    model, megatron = make(tmp_path / "model"), tmp_path / "megatron"
    with pytest.raises(UserError, match="no torch_dist checkpoint is there"):
        to_hf(model, tmp_path / "back", None, False, ignore)
    to_megatron(model, megatron, ignore)
    with pytest.raises(UserError, match=r"is missing: it is of another model"):
        to_hf(megatron, tmp_path / "back", make(tmp_path / "other", "qwen3"), False, ignore)
    with pytest.raises(UserError, match=r"config.json says otherwise"):
        to_hf(megatron, tmp_path / "back", make(tmp_path / "wide", hidden_size=64), False, ignore)
    file = next(megatron.glob("part_*/*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"distcp is missing or cut short: copy it again"):
        to_hf(megatron, tmp_path / "back", None, False, ignore)
