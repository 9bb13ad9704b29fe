"""The folder of adapters: there is always a whole one under its name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_mp.checkpoint.hf_writer import write_peft
from grpo_mp.config.sections import LoraConfig

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
