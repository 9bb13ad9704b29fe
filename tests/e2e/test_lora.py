"""Adapters that learn by RL with real engines: a resumed run, its checkpoints, its folders."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from grpo_mp.checkpoint.chunk_files import read_index
from grpo_mp.checkpoint.convert import to_hf
from grpo_mp.utils.errors import UserError
from tests.conftest import TinyRun
from tests.e2e.conftest import StartJob, letters_reward, run_well
from tests.e2e.jobs import ALONE, read_jsonl
from tests.parallel import peft_model
from tests.parallel.full_model import exceeding, file_tensors, relative_errors
from tools.tiny.models import make_tiny

pytestmark = pytest.mark.slow


def test_adapters_learn_resume_and_are_exported(start_job: StartJob, tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32, "initializer_range": 0.1}
    make_tiny(model, "deepseek_v3", tokenizer, **shape)
    settings = (
        f"run.folder={run}",
        f"model={{path: {model}, dtype: float32, lora: {{rank: 8, alpha: 32}}}}",
        "optimizer={lr: 0.01, lr_schedule: constant}",
        "rollout={prompts_per_step: 8, group_size: 8, max_prompt_tokens: 64, max_response_tokens: 16}",
        "data.eval={}",
        "run.save_every=1",
        letters_reward(tmp_path),
    )
    run_well(start_job(*settings, "run.steps=2", "layout={}", command=ALONE))
    run_well(start_job(*settings, "run.steps=12"))
    steps = [line for line in read_jsonl(run / "metrics.jsonl") if line["step"]]
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert all(step["mismatch/logprob_abs_diff/mean"] <= 1e-4 for step in steps)
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-2:]) > 1.3 * sum(rewards[:2])
    checkpoint = max((run / "checkpoints").iterdir())
    assert all(".lora_" in name for name in read_index(checkpoint / "policy"))
    with pytest.raises(UserError, match="holds adapters"):
        to_hf(checkpoint, tmp_path / "converted", model, False, lambda done, total: None)
    adapters = load_file(run / "final_adapter" / "adapter_model.safetensors")
    before = file_tensors(model)
    after = file_tensors(run / "final")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    targets = {name.removeprefix("base_model.model.").replace(".lora_A", "") for name in adapters if ".lora_A." in name}
    assert changed <= targets
    assert {name for name in targets if ".experts." not in name} <= changed  # not every expert is chosen
    by_peft = peft_model.merged_state(peft_model.load_peft(model, run / "final_adapter"))
    assert not exceeding(relative_errors(dict(peft_model.load(run / "final").state_dict()), dict(by_peft)), 1e-6)
