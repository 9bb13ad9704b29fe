"""On-policy distillation beside fine-tuning on the teacher's answers: `python -m tests.bench.distillation`.

Both begin with the quickstart's cold start, and learn from what the quickstart has trained (bash launch/quickstart.sh
makes the two) on the same number of samples: --steps times 256. On-policy distillation trains on the student's own
samples, a step of 32 prompts x 8, by configs/tiny_moe.yaml with algorithm.distillation; rewards are not learned from.
With --topk K --kl-type TYPE it learns from the teacher's K most likely tokens instead of the sampled one.
Fine-tuning trains once on as many answers of the teacher to as many prompts, unfiltered, by configs/tiny_sft.yaml, with
each of several learning rates, of which the best counts. Accuracy on 200 held-out problems, 4 samples each at
temperature 1. What stands in OUT is not run again: the bench can be broken off, and run in parts.

Reach: on-policy distillation is above the best fine-tuning by more than both standard errors, else exit status 1.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PROMPTS, SAMPLES = 32, 8  # of a step
RATES = ("3e-4", "1e-3", "3e-3")  # of fine-tuning
KL = "distill/reverse_kl/mean"
Score = tuple[float, float]  # accuracy and its standard error


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, default=Path("runs/quickstart/final"))
    parser.add_argument("--student", type=Path, default=Path("checkpoints/tiny_deepseek_v3_seed0"))
    parser.add_argument("--data", type=Path, default=Path("data/arithmetic_seed0"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topk", type=int)
    parser.add_argument("--kl-type", choices=("reverse", "forward", "mixed"), default="reverse")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    given = parser.parse_args()
    given.out = given.out / f"seed{given.seed}_{given.steps}"
    teacher = evaluate(given, "teacher", given.teacher)
    lines = distill(given)
    scores = {line["step"]: score_of(line) for line in lines if "eval/arithmetic/accuracy" in line}
    tuned = fine_tune(given)
    show(given, teacher, scores, {line["step"]: line[KL] for line in lines if KL in line}, tuned)
    (own, error), (best, its_error) = scores[given.steps], max(tuned.values())
    if own - best <= error + its_error:
        sys.exit(f"on-policy distillation ({own:.1%}) is not above fine-tuning ({best:.1%}) by more than their errors")


def distill(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Distill the teacher into the student; return the lines of the metrics."""
    of_topk = f", topk: {given.topk}, kl_type: {given.kl_type}" if given.topk else ""
    folder = given.out / (f"on_policy_top{given.topk}_{given.kl_type}" if given.topk else "on_policy")
    if not (folder / "final" / "config.json").exists():
        teacher = f"algorithm.distillation={{teacher: {{folder: {given.teacher}}}{of_topk}}}"
        run = [f"run.folder={folder}", f"run.seed={given.seed}", f"run.steps={given.steps}"]
        run += [f"run.eval_every={max(1, given.steps // 4)}", f"model.path={given.student}", teacher]
        grpo_mp("train", "configs/tiny_moe.yaml", *run, *data(given), "algorithm.kl.coef=0", "run.save_every=0")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fine_tune(given: argparse.Namespace) -> dict[str, Score]:
    """Fine-tune the student on as many answers of the teacher, with each rate; return the scores."""
    answers, tuned = given.out / "answers", dict[str, Score]()
    if not (answers / "samples.parquet").exists():
        count = [f"sample.max_prompts={PROMPTS * given.steps}", f"run.seed={given.seed}", *data(given)]
        drawn = ["--model", str(given.teacher), "--samples", str(SAMPLES), "--out", str(answers)]
        grpo_mp("sample", "configs/tiny_moe.yaml", *count, *drawn)
    for rate in RATES:
        folder = given.out / f"fine_tuned_{rate}"
        if not (folder / "final" / "config.json").exists():
            run = [f"run.folder={folder}", f"run.seed={given.seed}", f"model.path={given.student}", "run.save_every=0"]
            rates = [f"optimizer.lr={rate}", f"optimizer.min_lr={float(rate) / 10:g}"]
            train = [f"data.train={answers}/samples.parquet", "data.eval={}"]
            grpo_mp("sft", "configs/tiny_sft.yaml", *run, *rates, *train)
        tuned[rate] = evaluate(given, f"fine_tuned_{rate}_scores", folder / "final")
    return tuned


def evaluate(given: argparse.Namespace, name: str, model: Path) -> Score:
    """Return a model's held-out score."""
    folder = given.out / name
    if not (folder / "eval.json").exists():
        grpo_mp("evaluate", "configs/tiny_moe.yaml", "--model", str(model), "--out", str(folder), *data(given))
    scores = json.loads((folder / "eval.json").read_text())["sets"]["arithmetic"]
    return scores["accuracy"], scores["accuracy_error"]


def score_of(line: dict[str, Any]) -> Score:
    return line["eval/arithmetic/accuracy"], line["eval/arithmetic/accuracy_se"]


def data(given: argparse.Namespace) -> list[str]:
    evaluation = f"data.eval={{arithmetic: {{path: {given.data}/eval.jsonl, samples: 4}}}}"
    return [f"data.train={given.data}/train.jsonl", evaluation]


def grpo_mp(command: str, *arguments: str) -> None:
    started = [sys.executable, "-m", "grpo_mp", command, *arguments, "--ranks", "2"]
    subprocess.run(started, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


def show(
    given: argparse.Namespace,
    teacher: Score,
    scores: dict[int, Score],
    divergence: dict[int, float],
    tuned: dict[str, Score],
) -> None:
    """Print a row for each model."""
    table = Table("model", "samples", "held-out accuracy", "reverse KL to the teacher, nats a token")
    table.add_row("teacher", "", shown(teacher), "")
    for step, score in scores.items():
        name = "on-policy distillation" if step else "student"
        measured = f"{divergence[step]:.3f}" if step else f"{divergence[1]:.3f}"
        table.add_row(name, f"{step * PROMPTS * SAMPLES:,}", shown(score), measured)
    for rate, score in tuned.items():
        table.add_row(f"fine-tuned, rate {rate}", f"{given.steps * PROMPTS * SAMPLES:,}", shown(score), "")
    Console(width=120).print(table)


def shown(score: Score) -> str:
    return f"{score[0]:.1%} ± {score[1]:.1%}"


if __name__ == "__main__":
    main()
