"""A step of `grpo-mp sft` beside TRL's SFTTrainer on two cores: `python -m tests.bench.sft_beside_trl`.

Needs `pip install --no-deps trl==1.16.0 accelerate==1.15.0`. Both fine-tune the same tiny mixture of experts in fp32 on
the same chats, 128 a step: prompts of 256 tokens, answers of 16 to 512, each octave equally likely; one AdamW update a
step. TRL runs as one process of two threads and as two of one; the better counts. A step is the time from one update's
end to the next (TRL), and time/step_s (ours); the first step is left out. Reach: 1.5 times TRL's samples/s.
"""

import argparse
import json
import os
import random
import runpy
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tests.bench.compare_trl import CORES, FAMILIES, TRL_PROCESSES, run
from tests.bench.workload import BETAS, CLIP_GRAD, EPS, LEARNING_RATE, MODEL, describe, make_workload

BATCH = 128
CHATS = "chats.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, help="only this")
    parser.add_argument("--steps", type=int, default=4, help="steps of each side, the first one to warm up")
    parser.add_argument("--micro-batch", type=int, default=16, help="TRL's, sequences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl", type=Path, help="be a process of TRL's, in this folder")
    given = parser.parse_args()
    if given.trl:
        fine_tune_by_trl(given.trl, given.steps, given.micro_batch)
        return
    for family in [given.family] if given.family else FAMILIES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_chats(folder, family, given.seed, given.steps)
            compare(folder, family, given.steps, given.micro_batch)


def write_chats(folder: Path, family: str, seed: int, steps: int) -> None:
    """Write as many batches as there are steps: the same lengths in each."""
    lengths, draw = make_workload(folder, family, seed), random.Random(seed)
    print(f"{family}: {describe(lengths)}", flush=True)
    with (folder / CHATS).open("w") as file:
        for question, length in [(question, n) for _ in range(steps) for question, ns in lengths.items() for n in ns]:
            prompt = [{"role": "user", "content": question}]
            answer = [{"role": "assistant", "content": "".join(draw.choices("0123456789", k=length - 1))}]
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")


def compare(folder: Path, family: str, steps: int, micro_batch: int) -> None:
    """Run every side; prints a line for each, ours with its ratio to the better of TRL's."""
    theirs = {}
    for processes in TRL_PROCESSES:
        arguments = ["--trl", str(folder), "--steps", str(steps), "--micro-batch", str(micro_batch)]
        run("tests.bench.sft_beside_trl", arguments, processes, CORES // processes)
        theirs[processes] = json.loads((folder / "trl.json").read_text())
        print(line(f"TRL, {processes} x {CORES // processes} threads", family, theirs[processes]), flush=True)
    ours = time_ours(folder, steps)
    best = min(map(statistics.median, theirs.values()))
    print(line("grpo_mp, 2 ranks", family, ours), f"{best / statistics.median(ours):6.2f} x TRL", flush=True)


def line(side: str, family: str, seconds: list[float]) -> str:
    median = statistics.median(seconds)
    spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
    return f"{side:20}{family:14}{median:8.2f} s/step ({spread}){BATCH / median:8.2f} samples/s"


def time_ours(folder: Path, steps: int) -> list[float]:
    """Seconds of each step after the first."""
    settings = {
        "run": {"folder": str(folder / "run"), "steps": steps, "save_every": 0, "export": False},
        "model": {"path": str(folder / MODEL), "dtype": "float32"},
        "layout": {"expert": 2},
        "data": {"train": str(folder / CHATS), "shuffle": False},
        "sft": {"batch_size": BATCH, "max_tokens": 1024},
        "optimizer": {"lr": LEARNING_RATE, "clip_grad": CLIP_GRAD, "betas": list(BETAS), "eps": EPS},
        "training": {"max_tokens_per_microbatch": 4096},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))
    run("grpo_mp.sft", [str(folder / "sft.yaml")], CORES, 1)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["time/step_s"] for line in lines if (line["step"] or 0) > 1]


def fine_tune_by_trl(folder: Path, steps: int, micro_batch: int) -> None:
    """Be one process of TRL's side; the first writes the seconds of each step after the first."""
    import torch

    import grpo_mp.platform

    if not torch.cuda.is_available():
        # TRL imports torchvision, whose wheel is built for CUDA: the CPU engines' start-up hook lets it import.
        runpy.run_path(str(Path(grpo_mp.platform.__file__).parent / "engine_site" / "sitecustomize.py"))
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    ends = list[float]()

    class StepClock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=BATCH // (micro_batch * int(os.environ.get("WORLD_SIZE", 1))),
        completion_only_loss=True,
        router_aux_loss_coef=0.0,
        max_length=None,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_GRAD,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_steps=steps,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [json.loads(row) for row in (folder / CHATS).read_text().splitlines()]
    SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float32),
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / MODEL),
        callbacks=[StepClock()],
    ).train()
    if int(os.environ.get("RANK", 0)) == 0:
        (folder / "trl.json").write_text(json.dumps([end - start for start, end in pairwise(ends)]))


if __name__ == "__main__":
    main()
