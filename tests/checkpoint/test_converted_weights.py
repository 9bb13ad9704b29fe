"""Megatron loads converted folders, and a policy's checkpoints are converted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.compare import compare_weights
from grpo_mp.checkpoint.convert import to_hf, to_megatron
from grpo_mp.checkpoint.hf_reader import HfReader, read_non_policy_tensors
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.trainer.save import export_policy
from tests.checkpoint.helpers import no_progress, policy_of
from tests.policy.by_megatron import copies, load_by_megatron, unequal
from tests.save_policy import save_policy
from tools.tiny.models import make_tiny, make_tokenizer

CASES: list[tuple[str, dict[str, object], str]] = [
    ("qwen3", {"tie_word_embeddings": True}, "float32"),
    ("deepseek_v3", {}, "bfloat16"),
    ("qwen3_5_text", {}, "float32"),
    ("qwen3_next", {}, "bfloat16"),
    ("gpt_oss", {}, "bfloat16"),
]
PART_BYTES = 100_000
SMALL = {"num_hidden_layers": 2, "hidden_size": 64}


@pytest.mark.parametrize(("family", "shape", "dtype"), CASES)
def test_megatron_loads_a_converted_folder(family: str, shape: dict[str, object], dtype: str, tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", family, make_tokenizer(["apples"]), num_hidden_layers=3, hidden_size=64, **shape)
    to_megatron(tmp_path / "model", tmp_path / "megatron", no_progress, PART_BYTES)
    with policy_of(tmp_path / "model", dtype) as policy:
        direct = copies(policy)
        for tensor in policy.tensors.values():
            tensor.detach().fill_(7.0)
        load_by_megatron(policy, tmp_path / "megatron")
        assert unequal(policy, direct) == []


def test_an_export_has_the_tensors_outside_the_policy(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", "deepseek_v3", make_tokenizer(["apples"]), num_nextn_predict_layers=1, **SMALL)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    extra = {f"model.layers.2.{name}": torch.randn(8, 4) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    save_file(tensors | extra, tmp_path / "model" / "model.safetensors")
    with policy_of(tmp_path / "model", "float32") as policy:
        export_policy(policy, tmp_path / "export", tmp_path / "model", 2**20)
    assert compare_weights(HfReader(tmp_path / "model"), HfReader(tmp_path / "export")) == []


def test_tensors_outside_the_policy_are_dealt_out_to_the_ranks(tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek_v3", make_tokenizer(["apples"]), num_nextn_predict_layers=1, **SMALL)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.2.part_{size}": torch.randn(size) for size in (2, 30, 31, 32, 33)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    hf = HfConfig.read(tmp_path)
    shares = [dict(read_non_policy_tensors(tmp_path, hf, False, rank, 2)) for rank in (0, 1)]
    assert [sum(tensor.numel() for tensor in share.values()) for share in shares] == [33 + 31 + 2, 32 + 30]
    assert {name for share in shares for name in share} == extra.keys()
    assert all(torch.equal(tensor, extra[name]) for share in shares for name, tensor in share.items())


def test_a_converted_checkpoint_equals_its_export(model: Path, tmp_path: Path) -> None:
    (tmp_path / "step" / "policy").mkdir(parents=True)
    with policy_of(model, "float32") as policy:
        policy.tensors["decoder.final_layernorm.weight"].detach().mul_(2.0)
        save_policy(policy, tmp_path / "step" / "policy")
        export_policy(policy, tmp_path / "export", model, 2**20)
    to_hf(tmp_path / "step", tmp_path / "back", model, False, no_progress)
    assert compare_weights(HfReader(tmp_path / "export"), HfReader(tmp_path / "back")) == []
    (difference,) = compare_weights(HfReader(model), HfReader(tmp_path / "back"))
    assert difference.name == "model.norm.weight"
