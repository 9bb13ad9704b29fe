"""The plan of supervised fine-tuning, with numbers written out: ranks that only train, and no engine."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.model_configs import published_config
from grpo_mp.planner.plan import Plan, make_plan
from grpo_mp.utils.phases import GIB
from tests.cli.command import run_command
from tests.test_sft_settings import MINIMAL, settings_of

QWEN_7B = 7_615_616_512  # parameters, of which the embedding is a table
EMBEDDING = 152064 * 3584


def plan_of(batch_size: int = 256, **sections: Any) -> Plan:
    sections = {"sft": {"batch_size": batch_size, "max_tokens": 4096}, "layout": {"tensor": 2}} | sections
    config = published_config("qwen2.5-7b")
    cluster = read_cluster("h100-80")
    return make_plan(make_job(settings_of(**sections), config, cluster, 1, mean_tokens=1024))


def test_device_holds_weights_gradients_and_a_share_of_adam() -> None:
    (sizes,) = plan_of().memory.device
    held = QWEN_7B / 2  # by tensor parallelism, but for the norms
    for sub_phase in (SubPhase.TRAIN, SubPhase.OPTIMIZER, SubPhase.SAVE):
        assert sizes[sub_phase]["weights"] == pytest.approx(2 * held, rel=1e-3)
        assert sizes[sub_phase]["gradients"] == pytest.approx(4 * held, rel=1e-3)
        assert sizes[sub_phase]["optimizer"] == pytest.approx(12 * held / 4, rel=1e-3)
    kinds = {kind for of_phase in sizes.values() for kind in of_phase}
    assert not [kind for kind in kinds if "engine" in kind or "cache" in kind or "graph" in kind]
    assert min(sizes[SubPhase.TRAIN]["activations"], sizes[SubPhase.TRAIN]["logits"]) > 0


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU holds 16 bytes a parameter and does not; eight by expert and tensor parallelism do."""
    settings = MINIMAL | {"model": {"path": "checkpoints/Qwen2.5-7B-Instruct"}, "sft": MINIMAL["sft"]}
    config = tmp_path / "sft.yaml"
    config.write_text(yaml.safe_dump(settings))
    small = run_command(capsys, "plan", config, "--gpus-per-node", "1")
    assert small.status == 1
    assert "does not fit" in small.out
    fitting = run_command(capsys, "plan", config, "layout.tensor=2")
    assert fitting.status == 0, fitting.out
    assert "1 x 8 x h100-80: fits. rank 0 (pipeline stage 0): " in fitting.out
    (peak,) = (float(word) for word in fitting.out.split("stage 0): ")[1].split()[:1])
    assert QWEN_7B / 2 * (2 + 4 + 3) / GIB < peak < 80
