"""Folders of safetensors: written here and read by safetensors, and the other way.

Damaged and missing files; the folder of adapters, of which there is always a whole one under its name.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import INDEX, HfReader
from grpo_mp.checkpoint.hf_writer import copy_aux_files, write_peft
from grpo_mp.config.sections import LoraConfig
from grpo_mp.models.families import FAMILIES
from grpo_mp.utils.errors import UserError
from tests.checkpoint.helpers import write_hf

TENSORS = {
    "model.a": torch.arange(24, dtype=torch.float32).view(6, 4),
    "model.b": torch.arange(10, dtype=torch.bfloat16),
    "model.c": torch.arange(30, dtype=torch.float32).view(10, 3).t(),
    "model.d": torch.zeros(2, 2, 2),
}


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """A folder with weights of its own, a config and a tokenizer."""
    folder = tmp_path / "like"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("tokens")
    (folder / INDEX).write_text("old")
    (folder / "pytorch_model.bin").write_text("old")
    save_file({"old": torch.zeros(1)}, folder / "model-00001-of-00001.safetensors")
    return folder


def check_tensors(folder: Path) -> None:
    with HfReader(folder) as reader:
        assert reader.names == frozenset(TENSORS)
        for name, tensor in TENSORS.items():
            assert reader.shape(name) == tuple(tensor.shape)
            assert reader.read(name).dtype == tensor.dtype
            assert torch.equal(reader.read(name), tensor)


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (130, 3), (1, 4)])
def test_written_tensors_are_read_back(shard_bytes: int, files: int, tmp_path: Path, like: Path) -> None:
    write_hf(tmp_path / "out", TENSORS.items(), like, shard_bytes)
    check_tensors(tmp_path / "out")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == files
    contents = [load_file(shard) for shard in shards]
    assert sum(len(tensors) for tensors in contents) == len(TENSORS)
    for tensors in contents:
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= shard_bytes
    aux_files = {path.name for path in (tmp_path / "out").iterdir()} - {shard.name for shard in shards}
    assert aux_files == {"config.json", "tokenizer.json"} | ({INDEX} if files > 1 else set())


KEPT = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tiktoken.model", "x.tiktoken"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"),
    *("tokenization_own.py", "LICENSE", "README.md", "preprocessor_config.json"),
)
LEFT = (
    *("model.gguf", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "consolidated.00.pth", "model.ckpt", INDEX),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "onnx/model.onnx", "adapter_config.json"),
    *("adapter_model.safetensors", "adapter_model.bin", "trainer_state.json", "training_args.bin", "optimizer.pt"),
    *("rng_state_0.pth", "scheduler.pt", "all_results.json", "events.out.tfevents.1", "global_step9/zero.pt", "latest"),
    *("manifest.json", "metadata.json", ".metadata", ".gitattributes", "nohup.out"),
)


def test_what_goes_with_the_weights(tmp_path: Path) -> None:
    for name in (*KEPT, *LEFT):
        (tmp_path / "like" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "like" / name).write_text("{}" if name == "config.json" else name)
    (tmp_path / "like" / "tokenizer_config.json").rename(tmp_path / "stored")  # as in a cache of downloads
    (tmp_path / "like" / "tokenizer_config.json").symlink_to(tmp_path / "stored")
    write_hf(tmp_path / "out", TENSORS.items(), tmp_path / "like")
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert written == {*KEPT, "model.safetensors"}
    assert not (tmp_path / "out" / "tokenizer_config.json").is_symlink()
    (tmp_path / "again").mkdir()
    copy_aux_files(tmp_path / "out", tmp_path / "again")
    for name in KEPT[1:]:
        assert (tmp_path / "again" / name).read_text() == name


def test_slices_are_read(tmp_path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "model.safetensors")
    with HfReader(tmp_path) as reader:
        assert torch.equal(reader.read("model.a", 0, 2, 5), TENSORS["model.a"][2:5])
        assert torch.equal(reader.read("model.a", 1, 1, 3), TENSORS["model.a"][:, 1:3])
        assert torch.equal(reader.read("model.b", 0, 4, 4), TENSORS["model.b"][4:4])
        with pytest.raises(UserError, match=r"no file holds the tensor model.x"):
            reader.read("model.x")


def test_a_failed_write_leaves_the_old_folder(tmp_path: Path, like: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield "model.a", torch.ones(2)
        raise RuntimeError("the rank died")

    write_hf(tmp_path / "out", TENSORS.items(), like)
    with pytest.raises(RuntimeError, match="the rank died"):
        write_hf(tmp_path / "out", failing(), like)
    check_tensors(tmp_path / "out")
    write_hf(tmp_path / "out", list(TENSORS.items())[:1], like)
    with HfReader(tmp_path / "out") as reader:
        assert reader.names == {"model.a"}


def test_missing_files_and_a_broken_index_are_named(tmp_path: Path, like: Path) -> None:
    with pytest.raises(UserError, match=rf"contains neither model.safetensors nor {INDEX}"):
        HfReader(tmp_path)
    write_hf(tmp_path / "out", TENSORS.items(), like, 130)
    (tmp_path / "out" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors is missing: the index names it"):
        HfReader(tmp_path / "out")
    for text in ("{", "[]", '{"weight_map": 3}'):
        (tmp_path / "out" / INDEX).write_text(text)
        with pytest.raises(UserError, match=r"not an index of safetensors files|not valid JSON"):
            HfReader(tmp_path / "out")


def test_a_folder_that_is_replaced_is_whole_under_its_name(
    tmp_path: Path, like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever file of the former one a kill finds removed last."""
    out = tmp_path / "out"
    write_hf(out, TENSORS.items(), like)
    looked = list[Path]()
    unlink = os.unlink

    def look(path: Any, *args: Any, **more: Any) -> None:
        looked.append(Path(path))
        if out.exists():
            with HfReader(out) as reader:
                assert reader.names in ({"model.a"}, TENSORS.keys())
        unlink(path, *args, **more)

    monkeypatch.setattr(os, "unlink", look)
    write_hf(out, list(TENSORS.items())[:1], like)
    assert len(looked) > 1
    with HfReader(out) as reader:
        assert reader.names == {"model.a"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


NAME = "model.layers.0.self_attn.q_proj.lora_A.weight"


def test_a_folder_that_cannot_take_its_place_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapter"
    lora = LoraConfig(rank=1, alpha=1.0)
    write_peft(folder, [(NAME, torch.zeros(1, 4))], tmp_path, lora, FAMILIES["qwen3"])
    before = load_file(folder / "adapter_model.safetensors")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target == folder:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write_peft(folder, [(NAME, torch.ones(1, 4))], tmp_path, lora, FAMILIES["qwen3"])
    monkeypatch.undo()
    (left,) = [path for path in (folder, folder.with_name("adapter.former")) if path.exists()]
    after = load_file(left / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    write_peft(folder, [(NAME, torch.ones(1, 4))], tmp_path, lora, FAMILIES["qwen3"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
