"""A checkpoint of a run that trains the multi-token-prediction layer, converted back to Hugging Face files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.convert import to_hf
from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.policy import Policy
from tests.parallel.full_model import file_tensors
from tests.planner.jobs import BASE
from tests.save_policy import save_policy
from tools.tiny.models import add_mtp_layer, make_tiny, make_tokenizer

LAYERS = {"deepseek_v3": "model.layers.2.", "qwen3_next": "mtp.", "qwen3_5_moe_text": "mtp."}
COPIES = {
    "model.embed_tokens.weight": "model.layers.2.embed_tokens.weight",
    "lm_head.weight": "model.layers.2.shared_head.head.weight",
}


def stack_experts(file: Path) -> None:
    """Store the layer's experts as some published folders do: gate and up, and down, of all experts in one tensor."""
    tensors = load_file(file)
    experts = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.layers.0.mlp.experts.")}
    gate, up, down = (
        torch.stack([experts[f"mtp.layers.0.mlp.experts.{i}.{part}_proj.weight"] for i in range(len(experts) // 3)])
        for part in ("gate", "up", "down")
    )
    stacked = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
    tensors |= {f"mtp.layers.0.mlp.experts.{part}": tensor for part, tensor in stacked.items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize(("trained", "fp8"), [(True, False), (True, True), (False, False)])
def test_the_layer_is_the_checkpoints_where_it_was_trained(
    parallel: Parallel, tmp_path: Path, trained: bool, fp8: bool, family: str
) -> None:
    """Every weight grows by 1; where the layer is not trained, it stays as it was in the folder."""
    model, saved = tmp_path / "model", tmp_path / "saved"
    counted = {"deepseek_v3": "num_nextn_predict_layers", "qwen3_5_moe_text": "mtp_num_hidden_layers"}
    counts = {counted[family]: 1} if family in counted else {}  # Qwen3-Next's config.json does not count its layer
    make_tiny(model, family, make_tokenizer(["apples"]), num_hidden_layers=2, **counts)
    add_mtp_layer(model)
    if family == "qwen3_5_moe_text":
        stack_experts(model / "model.safetensors")
    settings = {"path": model, "dtype": "float32", "mtp_loss_scaling_factor": 0.1 if trained else 0.0}
    policy = Policy(check_settings(BASE | {"model": settings}, "test"), parallel, with_reference=False)
    for tensor in policy.tensors.values():
        tensor.data.add_(1)
    saved.mkdir()
    save_policy(policy, saved)
    to_hf(saved, tmp_path / "back", model, fp8, lambda done, total: None)
    before, after = file_tensors(model), file_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    of_layer = [name for name in before if name.startswith(LAYERS[family])]
    assert len(of_layer) > len(COPIES)
    for name in before:
        grown = before[name] + (1 if trained or name not in of_layer else 0)
        torch.testing.assert_close(after[name].float(), grown, rtol=0.07 if fp8 else 0, atol=0)
    if trained and family == "deepseek_v3":
        assert all(torch.equal(after[name], after[copy]) for name, copy in COPIES.items())
