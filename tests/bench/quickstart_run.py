"""What benches that train the quickstart's tiny policy share: its commands, by the interpreter that they run in."""

import os
import subprocess
import sys
from pathlib import Path

CONFIG = "configs/tiny_moe.yaml"


def run_module(module: str, *arguments: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", module, *arguments], env=environment, check=True)


def grpo_mp(*arguments: str) -> None:
    run_module("grpo_mp", *arguments)


def make_task(*arguments: str) -> None:
    run_module("tools.tiny.make", *arguments)


def make_model(seed: int, family: str = "deepseek_v3") -> tuple[Path, Path]:
    """Return a seed's cold-started model and its data, made where they are missing as launch/quickstart.sh does."""
    model = Path(f"checkpoints/tiny_{family}_seed{seed}")
    data = Path(f"data/arithmetic_seed{seed}")
    if not (model / "config.json").exists():
        made = ["--family", family, "--out", str(model), "--data", str(data), "--seed", str(seed)]
        make_task(*made, "--cold-start", "0.4")
    return model, data


def train(folder: Path, seed: int, *settings: str, family: str = "deepseek_v3") -> None:
    """Train a seed's model on two ranks, as launch/quickstart.sh does; `settings` override."""
    model, data = make_model(seed, family)
    evaluation = f"data.eval={{arithmetic: {{path: {data}/eval.jsonl, samples: 4}}}}"
    own = [f"run.folder={folder}", f"run.seed={seed}", f"model.path={model}", f"data.train={data}/train.jsonl"]
    grpo_mp("train", CONFIG, "--ranks", "2", *own, evaluation, *settings)
