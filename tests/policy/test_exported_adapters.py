"""Adapters of any targets, as peft loads them: its logits are those of the merged model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.policy import Policy, check_policy
from grpo_mp.trainer.save import export_adapters, export_policy
from tests.parallel import peft_model
from tests.parallel.lora import fill_b
from tests.planner.jobs import BASE
from tools.tiny.models import make_tiny, make_tokenizer

SEQUENCE = (3, 5, 7, 9, 11, 2, 4, 6)
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
TARGETS = [
    tuple(f"shared_experts.{name}" for name in FEED_FORWARD),
    ("o_proj", "mlp.down_proj"),
    ("mlp.up_proj",),  # without gate_proj: of experts they are one
    ("self_attn.o_proj", "kv_b_proj", "shared_experts.gate_proj", "down_proj"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "deepseek_v3"
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), initializer_range=0.1)
    return folder


def settings_of(model: Path, targets: tuple[str, ...] | str) -> Any:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": targets}
    return check_settings(BASE | {"model": {"path": str(model), "dtype": "float32", "lora": lora}}, "test")


def export(settings: Any, parallel: Parallel, folder: Path) -> tuple[Path, Path]:
    """Export adapters whose B is not zero, and the merged weights."""
    check_policy(settings.model.read_config(), settings.model, settings.layout, settings.training, 1)
    policy = Policy(settings, parallel, with_reference=False)
    fill_b(policy)
    adapters = folder / "adapter"
    merged = folder / "merged"
    export_adapters(policy, adapters, settings.model.path, None)
    export_policy(policy, merged, settings.model.path, None)
    return adapters, merged


def check_logits(by_peft: torch.nn.Module, merged: Path, base: Path) -> None:
    own, before = (peft_model.logits(peft_model.load(folder), SEQUENCE) for folder in (merged, base))
    scale = float(before.abs().max())
    assert (own - before).abs().max() > 1e-3 * scale
    assert (peft_model.logits(by_peft, SEQUENCE) - own).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_peft_has_the_logits_of_the_merged_model(
    targets: tuple[str, ...], model: Path, parallel: Parallel, tmp_path: Path
) -> None:
    adapters, merged = export(settings_of(model, targets), parallel, tmp_path)
    check_logits(peft_model.load_peft(model, adapters), merged, model)


def test_the_projections_of_a_dense_model_are_named_as_modules(parallel: Parallel, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny(model, "qwen3", make_tokenizer(["apples"]), num_hidden_layers=2, initializer_range=0.1)
    adapters, merged = export(settings_of(model, ("mlp.down_proj", "q_proj")), parallel, tmp_path)
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert (config["target_modules"], config["target_parameters"]) == (["mlp.down_proj", "q_proj"], None)
    check_logits(peft_model.load_peft(model, adapters), merged, model)
