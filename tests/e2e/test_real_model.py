"""A trained model: what random tiny ones hide, such as logits so sharp that rounding in bfloat16 changes them much."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.jobs import read_jsonl
from tests.smollm2 import make_smollm2, write_sums_run

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm2(tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct")


def grpo_mp(*arguments: object, status: int = 0) -> str:
    """Run a command; return what it printed."""
    command = [sys.executable, "-m", "grpo_mp", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_policy_and_engine_compute_what_transformers_does(model: Path) -> None:
    shown = grpo_mp("doctor", "model", model, "--dtype", "float32")
    assert "the policy computes what transformers does" in shown
    assert "the engine computes what transformers does" in shown


def test_converted_there_and_back_every_bit_is_the_same(model: Path, tmp_path: Path) -> None:
    grpo_mp("convert", "to-megatron", model, tmp_path / "megatron")
    grpo_mp("convert", "to-hf", tmp_path / "megatron", tmp_path / "hf")
    back = {name: one for file in (tmp_path / "hf").glob("*.safetensors") for name, one in load_file(file).items()}
    own = load_file(model / "model.safetensors")
    assert own.keys() <= back.keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in own.items())


def test_it_learns_to_answer_sums_is_resumed_exported_and_answers(model: Path, tmp_path: Path) -> None:
    settings = write_sums_run(tmp_path, model)
    run = tmp_path / "run"
    grpo_mp("train", settings, "--ranks", "1", "run.steps=5", "run.save_every=5", "run.export=false")
    assert "resumes after step 5" in grpo_mp("train", settings, "--ranks", "1")
    steps = read_jsonl(run / "metrics.jsonl")[1:]
    assert [step["step"] for step in steps] == list(range(1, 11))
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert all(step["sync/check/logprob_abs_diff/mean"] < 1e-4 for step in steps)
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    messages = [
        {"role": "system", "content": "Answer with the number only."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = final.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "5" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_in_bfloat16_it_starts(model: Path, tmp_path: Path) -> None:
    """Its logprobs change by 0.05 nats where the order of sums changes, and no engine is wrong for that."""
    settings = write_sums_run(tmp_path, model, run={"steps": 1, "export": False}, model={"dtype": "bfloat16"})
    grpo_mp("train", settings, "--ranks", "1", "rollout.prompts_per_step=2", "rollout.group_size=2")
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert 0.01 < line["sync/check/logprob_abs_diff/mean"] < line["sync/check/limit"] < 0.2


def test_in_bfloat16_an_engine_with_another_rope_stops_the_run(model: Path, tmp_path: Path) -> None:
    rope = json.loads((model / "config.json").read_text())["rope_parameters"] | {"rope_theta": 1000.0}
    engine = {"args": {"json_model_override_args": json.dumps({"rope_parameters": rope, "rope_theta": 1000.0})}}
    settings = write_sums_run(tmp_path, model, run={"steps": 1}, model={"dtype": "bfloat16"}, engine=engine)
    said = grpo_mp("train", settings, "--ranks", "1", status=2)
    assert "a second sync changes nothing: the engine computes another function" in said
    assert "grpo-mp doctor model" in said
