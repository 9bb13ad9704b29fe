"""A multi-token-prediction layer that learns beside the policy: `python -m tests.bench.mtp_acceptance [--steps 60]`.

The quickstart's tiny model with a random layer of that kind, trained by the quickstart's settings. Printed by fifths of
the run: cross entropy of the token after the next, the share of drafts of one token that speculative decoding would
accept (of what the policy samples at rollout.temperature), and the reward beside that of a run without the layer.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from tests.bench.quickstart_run import make_task
from tests.bench.quickstart_seeds import read_metrics
from tools.tiny.models import add_mtp_layer

MODEL, DATA = Path("checkpoints/tiny_deepseek_v3_seed0"), Path("data/arithmetic_seed0")
PARTS = 5


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.1, 0.0])
    args = parser.parse_args()
    if not (MODEL / "config.json").exists():
        make_task("--family", "deepseek_v3", "--out", str(MODEL), "--data", str(DATA), "--cold-start", "0.4")
    folder = Path("checkpoints/tiny_deepseek_v3_mtp")
    if not folder.exists():
        _with_layer(folder)
    table = Table("factor", "steps", "loss of the layer", "accepted drafts", "reward")
    for factor in args.factors:
        run = Path(f"runs/mtp_{factor:g}")
        _train(run, folder, factor, args.steps)
        for row in _rows([step for step in read_metrics(run) if step["step"]]):
            table.add_row(f"{factor:g}", *row)
    Console(width=100).print(table)


def _with_layer(folder: Path) -> None:
    shutil.copytree(MODEL, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    add_mtp_layer(folder)


def _train(run: Path, model: Path, factor: float, steps: int) -> None:
    settings = [
        *(f"run.folder={run}", f"model.path={model}", f"model.mtp_loss_scaling_factor={factor}", f"run.steps={steps}"),
        *(f"data.train={DATA / 'train.jsonl'}", "data.eval={}", "run.resume=never"),
    ]
    subprocess.run(
        [sys.executable, "-m", "grpo_mp", "train", "configs/tiny_moe.yaml", "--ranks", "2", *settings], check=True
    )


def _rows(steps: Sequence[dict[str, float]]) -> list[list[str]]:
    """One row for each part of a run."""
    bounds = [len(steps) * part // PARTS for part in range(PARTS + 1)]
    rows = []
    for start, end in pairwise(bounds):
        part = steps[start:end]
        values = [
            f"{fmean(step[name] for step in part):.3f}" if name in part[0] else "-"
            for name in ("train/mtp_loss", "train/mtp_acceptance", "reward/mean")
        ]
        rows.append([f"{start + 1}-{end}", *values])
    return rows


if __name__ == "__main__":
    main()
