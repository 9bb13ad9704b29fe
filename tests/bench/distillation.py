"""On-policy distillation beside fine-tuning: `python -m tests.bench.distillation [--seeds 0 1 2]`.

The task is the quickstart's with numbers of three digits, subtraction and two steps: answers of 35 tokens. The
teacher, a tiny DeepSeek-V3, has learned it from worked examples. The student, a dense model of a tenth of its size,
has begun to. Both methods get the same number of samples, one for each of as many prompts, 10,240 by default. On-policy
distillation trains on the student's own samples, a step of --prompts, by configs/tiny_moe.yaml with
algorithm.distillation; rewards are not learned from. Fine-tuning trains on the teacher's answers, unfiltered, by
configs/tiny_sft.yaml, with each of several rates and batch sizes, of which the best counts. Accuracy on 200 held-out
problems, 4 samples each at temperature 1. What stands in OUT is not run again: the bench can be broken off, and run in
parts. --teacher, --student and --data name others, as those of the quickstart.

A seed has its own data, teacher, student, samples and order. Reach: on-policy distillation is above the best
fine-tuning in each seed, and the mean of what it is above by twice its standard error over the seeds, else exit status
1; of one seed by both scores' standard errors, which are those of the problems, the same for both.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from tests.bench.quickstart_run import grpo_mp, make_task
from tools.tiny.arithmetic import vocabulary_words
from tools.tiny.cold_start import FILES, cold_start, cold_start_settings
from tools.tiny.models import make_tiny, make_tokenizer

TUNED = (("2e-4", 16), ("3e-4", 16), ("5e-4", 16), ("5e-4", 32), ("1e-3", 32))  # rate, batch size
TASK = ("--largest", "999", "--kinds", "add", "subtract", "two_steps", "--train", "20000", "--slips", "0")
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 128}  # of the student
# Probability of a held-out worked answer that ends the cold start
TEACHER_TARGET = 0.85
STUDENT_TARGET = 0.25
MAX_RESPONSE_TOKENS = 96  # of an answer
Score = tuple[float, float]  # accuracy and its standard error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="a folder; made where there is none")
    parser.add_argument("--student", type=Path, help="a folder; made where there is none")
    parser.add_argument("--data", type=Path, help="a folder with train and eval.jsonl")
    parser.add_argument("--steps", type=int, default=80, help="of on-policy distillation")
    parser.add_argument("--prompts", type=int, default=128, help="of such a step, with one sample each")
    parser.add_argument("--updates", type=int, default=8, help="of such a step")
    parser.add_argument("--passes", type=int, nargs="+", default=[1], help="over the samples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--kl-type", choices=("reverse", "forward", "mixed"), default="reverse")
    parser.add_argument("--rate", default="5e-4", help="of on-policy distillation")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    given = parser.parse_args()
    if len({given.teacher is None, given.student is None, given.data is None}) > 1:
        parser.error("give --teacher, --student and --data together, or none of them")
    pairs = [compare(argparse.Namespace(**vars(given)), seed) for seed in given.seeds]
    if problem := judge(pairs):
        sys.exit(problem)


def compare(given: argparse.Namespace, seed: int) -> tuple[Score, Score]:
    seed_folder = given.out / f"seed{seed}"
    given.out = seed_folder / f"{given.steps}x{given.prompts}"
    given.seed = seed
    given.data = given.data or seed_folder / "data"
    given.teacher = given.teacher or make_teacher(seed_folder, seed)
    given.student = given.student or make_student(seed_folder, seed)
    scores = {
        "teacher": evaluate(given, "teacher", given.teacher),
        "student": evaluate(given, "student", given.student),
    }
    best = dict[int, Score]()
    for passes in given.passes:
        scores[on_policy_name(passes)] = distill(given, passes)
        tuned = {
            f"fine-tuned, rate {rate}, batch {size}, {passes} pass(es)": fine_tune(given, rate, size, passes)
            for rate, size in TUNED
        }
        scores |= tuned
        best[passes] = max(tuned.values())
    show(scores, f"seed {seed}, {given.prompts * given.steps:,} samples")
    return scores[on_policy_name(given.passes[0])], best[given.passes[0]]


def judge(pairs: Sequence[tuple[Score, Score]]) -> str:
    """Print by how much distillation is above the best fine-tuning; return what it does not reach, "" for nothing."""
    gaps = [own - other for (own, _), (other, _) in pairs]
    if len(pairs) == 1:
        (((_, error), (_, its_error)),) = pairs
        needed = error + its_error
    else:
        needed = 2 * stdev(gaps) / sqrt(len(gaps))
    listed = ", ".join(f"{gap:+.1%}" for gap in gaps)
    print(f"on-policy distillation beside the best fine-tuning: {listed}; mean {fmean(gaps):+.1%}, needed {needed:.1%}")
    return "" if min(gaps) > 0 and fmean(gaps) > needed else "on-policy distillation is not above fine-tuning by enough"


def make_teacher(seed_folder: Path, seed: int) -> Path:
    """Make the task's data and a model that has learned it from worked examples, where they are missing."""
    folder = seed_folder / "teacher"
    if not (folder / "config.json").exists():
        drawn = ["--data", str(seed_folder / "data"), "--out", str(folder), "--seed", str(seed), *TASK]
        make_task("--cold-start", str(TEACHER_TARGET), "--steps", "1000", *drawn)
    return folder


def make_student(seed_folder: Path, seed: int) -> Path:
    folder = seed_folder / "student"
    begin = seed_folder / "student_random"
    if not (folder / "config.json").exists():
        make_tiny(begin, "qwen3", make_tokenizer(vocabulary_words()), seed, **SHAPE)
        examples = (seed_folder / "data" / name for name in FILES)
        cold_start(cold_start_settings(begin, *examples, seed, 1000), folder, STUDENT_TARGET, lambda step: None)
    return folder


def on_policy_name(passes: int) -> str:
    return f"on-policy distillation, {passes} pass(es)"


def distill(given: argparse.Namespace, passes: int) -> Score:
    folder = given.out / f"on_policy_{given.kl_type}_top{given.topk}_{given.rate}_{given.updates}_{passes}"
    if not (folder / "final" / "config.json").exists():
        teacher = f"{{teacher: {{path: {given.teacher}}}, topk: {given.topk}, kl_type: {given.kl_type}}}"
        run = [f"run.folder={folder}", f"run.seed={given.seed}", f"run.steps={given.steps}", "run.eval_every=0"]
        run += ["run.save_every=0", f"model.path={given.student}", "layout={}", "algorithm.kl.coef=0"]
        run += [f"algorithm.distillation={teacher}", f"rollout.prompts_per_step={given.prompts}"]
        run += ["rollout.group_size=1", f"training.updates_per_step={given.updates}", f"training.epochs={passes}"]
        run += [f"optimizer.lr={given.rate}", f"optimizer.min_lr={float(given.rate) / 10:g}"]
        grpo_mp("train", "configs/tiny_moe.yaml", "--ranks", "2", *run, *data(given))
    return evaluate(given, f"{folder.name}_scores", folder / "final")


def fine_tune(given: argparse.Namespace, rate: str, batch_size: int, passes: int) -> Score:
    answers = given.out / "answers"
    folder = given.out / f"fine_tuned_{rate}_{batch_size}_{passes}"
    if not (answers / "samples.parquet").exists():
        drawn = [f"sample.max_prompts={given.prompts * given.steps}", f"run.seed={given.seed}", *data(given)]
        drawn += ["--model", str(given.teacher), "--samples", "1", "--out", str(answers)]
        grpo_mp("sample", "configs/tiny_moe.yaml", "--ranks", "2", *drawn)
    if not (folder / "final" / "config.json").exists():
        run = [f"run.folder={folder}", f"run.seed={given.seed}", "run.save_every=0"]
        run += [f"model.path={given.student}", "layout={}", f"sft.batch_size={batch_size}", f"run.epochs={passes}"]
        rates = [f"optimizer.lr={rate}", f"optimizer.min_lr={float(rate) / 10:g}"]
        train = [f"data.train={answers}/samples.parquet", "data.eval={}"]
        grpo_mp("sft", "configs/tiny_sft.yaml", "--ranks", "2", *run, *rates, *train)
    return evaluate(given, f"{folder.name}_scores", folder / "final")


def evaluate(given: argparse.Namespace, name: str, model: Path) -> Score:
    folder = given.out / name
    if not (folder / "eval.json").exists():
        scored = ["--model", str(model), "--out", str(folder), "layout={}", *data(given)]
        grpo_mp("evaluate", "configs/tiny_moe.yaml", "--ranks", "2", *scored)
    scores = json.loads((folder / "eval.json").read_text())["sets"]["arithmetic"]
    return scores["accuracy"], scores["accuracy_error"]


def data(given: argparse.Namespace) -> list[str]:
    evaluation = f"data.eval={{arithmetic: {{path: {given.data}/eval.jsonl, samples: 4}}}}"
    return [f"data.train={given.data}/train.jsonl", evaluation, f"rollout.max_response_tokens={MAX_RESPONSE_TOKENS}"]


def show(scores: dict[str, Score], title: str) -> None:
    table = Table("model", "held-out accuracy", title=title)
    for name, (accuracy, error) in scores.items():
        table.add_row(name, f"{accuracy:.1%} ± {error:.1%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
