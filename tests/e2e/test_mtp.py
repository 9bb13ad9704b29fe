"""A multi-token-prediction layer that learns beside the policy: metrics, a resumed run, the exported folder."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from grpo_mp.checkpoint.convert import to_hf
from tests.conftest import TinyRun
from tests.e2e.conftest import StartJob, letters_reward, run_well
from tests.e2e.jobs import read_jsonl
from tests.parallel.full_model import file_tensors
from tools.tiny.models import add_mtp_layer, make_tiny

pytestmark = pytest.mark.nightly
LAYER = "model.layers.2."
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {  # family -> first part of the layer's names, shape, arguments
    "deepseek_v3": (LAYER, {"num_nextn_predict_layers": 1, "initializer_range": 0.1}, ""),
    # SGLang would take a third of the memory for states of linear attention.
    "qwen3_5_moe_text": ("mtp.", {"mtp_num_hidden_layers": 1}, "max_mamba_cache_size: 128"),
}


def fill_padding_row(model: Path, token: int) -> None:
    """Give the padding token, which is sampled here, an embedding: norms of zeros have gradients of up to 1e7."""
    tensors = load_file(model / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[token] = embedding.std() * torch.randn(embedding.shape[1])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_predicts_ahead_learns_and_is_exported(
    start_job: StartJob, tiny_run: TinyRun, tmp_path: Path, family: str
) -> None:
    prefix, shape, arguments = FAMILIES[family]
    model = tmp_path / "model"
    run = tmp_path / "run"
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    make_tiny(model, family, tokenizer, num_hidden_layers=2, **shape)
    fill_padding_row(model, tokenizer.pad_token_id)
    add_mtp_layer(model)
    settings = (
        f"run.folder={run}",
        f"model={{path: {model}, dtype: float32, mtp_loss_scaling_factor: 0.1}}",
        "layout={pipeline: 2}",
        f"engine.args={{{arguments}}}",
        "optimizer.lr=0.01",
        "data.eval={}",
        "training.updates_per_step=2",
        "training.router_replay=R2",
        "run.save_every=1",
        letters_reward(tmp_path),
    )
    for steps in (1, 6):  # the losses of the last steps are lower; between two steps they may rise
        run_well(start_job(*settings, f"run.steps={steps}"))
    steps = [line for line in read_jsonl(run / "metrics.jsonl") if line["step"]]
    assert [step["step"] for step in steps] == list(range(1, 7))
    losses = [step["train/mtp_loss"] for step in steps]
    assert all(0 < loss < 2 * math.log(200) for loss in losses)
    # A random model of Qwen learns slowly here; that its gradient is right is shown in tests/parallel.
    assert min(losses[1:]) < (0.9 if family == "deepseek_v3" else 1.0) * losses[0]
    assert all(0 < step["train/mtp_acceptance"] < 1 for step in steps)
    assert all(step["mismatch/logprob_abs_diff/mean"] <= 1e-4 for step in steps)
    before = file_tensors(model)
    after = file_tensors(run / "final")
    assert before.keys() == after.keys()
    learned = [name for name in before if name.startswith(prefix) and "e_score_correction_bias" not in name]
    unchanged = [name for name in learned if torch.equal(before[name], after[name])]
    assert [name for name in unchanged if ".experts." not in name] == []  # not every expert is chosen
    to_hf(run / "checkpoints" / "step_000006", tmp_path / "converted", model, False, lambda done, total: None)
    converted = file_tensors(tmp_path / "converted")
    assert converted.keys() == after.keys()
    assert [name for name in after if not torch.equal(after[name], converted[name])] == []
    if family != "deepseek_v3":  # Qwen's files hold no copies
        return
    assert torch.equal(after[f"{LAYER}embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert torch.equal(after[f"{LAYER}shared_head.head.weight"], after["lm_head.weight"])
