"""The folder of adapters: there is always a whole one under its name, and its base is told from others."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.convert import to_megatron
from grpo_mp.checkpoint.peft_folder import write_peft
from grpo_mp.checkpoint.weights_digest import has_weights_digest, weights_digest
from grpo_mp.config.lora_section import LoraConfig
from tests.checkpoint.helpers import flip_bit, no_progress

NAME = "model.layers.0.self_attn.q_proj.lora_A.weight"


def test_a_folder_that_cannot_take_its_place_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lora = tmp_path / "adapter", LoraConfig(rank=1, alpha=1.0)
    write_peft(folder, [(NAME, torch.zeros(1, 4))], tmp_path, lora)
    before = load_file(folder / "adapter_model.safetensors")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target == folder:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write_peft(folder, [(NAME, torch.ones(1, 4))], tmp_path, lora)
    monkeypatch.undo()
    (left,) = [path for path in (folder, folder.with_name("adapter.former")) if path.exists()]
    after = load_file(left / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    write_peft(folder, [(NAME, torch.ones(1, 4))], tmp_path, lora)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two files with tensors of no, one and many samples' bytes."""
    folder = tmp_path / "base"
    folder.mkdir()
    for number in range(2):
        tensors = {f"{number}.{size}": torch.rand(size) for size in (0, 1, 3000, 3100, 50_000)}
        save_file(tensors, folder / f"model-{number}.safetensors")
    return folder


def positions(file: Path) -> list[int]:
    """The first, middle and last byte of each tensor: found by its values, which are random."""
    content, found = file.read_bytes(), list[int]()
    for tensor in load_file(file).values():
        if size := tensor.nbytes:
            start = content.index(tensor.numpy().tobytes())
            found += [start, start + size // 2, start + size - 1]
    return found


def test_the_digest_sees_the_first_middle_and_last_byte_of_each_tensor(base: Path) -> None:
    before = weights_digest(base)
    for file in base.iterdir():
        found = positions(file)
        assert len(found) == 12
        for position in (*found, 8, 20):  # the last two are of the header
            flip_bit(file, position)
            assert weights_digest(base) != before, f"{file.name}, byte {position}"
            assert not has_weights_digest(base, before)
            flip_bit(file, position)
    assert has_weights_digest(base, before)
    (base / "model-1.safetensors").rename(base / "model-2.safetensors")
    assert not has_weights_digest(base, before)


def test_every_tensor_of_a_model_counts(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (file,) = (tmp_path / "copy").glob("*.safetensors")
    before, weights = weights_digest(model), load_file(file)
    for name, tensor in weights.items():
        save_file(weights | {name: tensor + 1}, file, metadata={"format": "pt"})
        assert weights_digest(tmp_path / "copy") != before, name
    save_file(weights, file, metadata={"format": "pt"})
    assert weights_digest(tmp_path / "copy") == before


def former_digest(folder: Path) -> str:
    """As versions before samples of tensors computed it, which checkpoints have."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".distcp")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        content = file.read_bytes()
        for number in range(16):
            start = max(0, size - 4096) * number // 15
            digest.update(content[start : start + 4096])
    return digest.hexdigest()


def test_a_digest_of_an_older_version_is_compared_as_it_was_made(base: Path) -> None:
    former = former_digest(base)
    assert has_weights_digest(base, former)
    flip_bit(base / "model-0.safetensors", -1)
    assert not has_weights_digest(base, former)
    assert not has_weights_digest(base, "")


def test_files_that_are_not_safetensors_are_sampled_as_a_whole(model: Path, tmp_path: Path) -> None:
    to_megatron(model, tmp_path / "megatron", no_progress)
    (tmp_path / "megatron" / "cut.safetensors").write_bytes(bytes(7))
    before = weights_digest(tmp_path / "megatron")
    (part,) = (tmp_path / "megatron").glob("part_*/*.distcp")
    for file in (tmp_path / "megatron" / "cut.safetensors", part):
        for byte in (0, -1):
            flip_bit(file, byte)
            assert not has_weights_digest(tmp_path / "megatron", before), file.name
            flip_bit(file, byte)
    assert has_weights_digest(tmp_path / "megatron", before)
