"""A step of `grpo-mp sft` beside TRL's SFTTrainer on two cores: `python -m tests.bench.sft_beside_trl`.

Needs `pip install --no-deps trl==1.16.0 accelerate==1.15.0`. Both fine-tune the same tiny mixture of experts in fp32 on
the same chats, 128 a step: prompts of 256 tokens, answers of 16 to 512, each octave equally likely; one AdamW update a
step. TRL runs as one process of two threads and as two of one; the better counts. A step is the time from one update's
end to the next (TRL), and time/step_s (ours); the first step is left out. Reach: 1.5 times TRL's samples/s.
"""

import json
import random
from pathlib import Path

import yaml

from tests.bench.compare_trl import CORES, compare, run, workloads
from tests.bench.workload import BETAS, CLIP_GRAD, EPS, GROUP_SIZE, LEARNING_RATE, MODEL, PROMPTS, read_lengths

CHATS = "chats.jsonl"


def main() -> None:
    for folder, family, given in workloads(__doc__):
        write_chats(folder, given.seed, given.steps)
        compare(folder, family, given, time_ours, "--chats", CHATS)


def write_chats(folder: Path, seed: int, steps: int) -> None:
    """Write as many batches as there are steps: the same lengths in each."""
    lengths = read_lengths(folder)
    draw = random.Random(seed)
    with (folder / CHATS).open("w") as file:
        for question, length in [(question, n) for _ in range(steps) for question, ns in lengths.items() for n in ns]:
            prompt = [{"role": "user", "content": question}]
            answer = [{"role": "assistant", "content": "".join(draw.choices("0123456789", k=length - 1))}]
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")


def time_ours(folder: Path, steps: int, ranks: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step after the first."""
    settings = {
        "run": {"folder": str(folder / "run"), "steps": steps, "save_every": 0, "export": False},
        "model": {"path": str(folder / MODEL), "dtype": "float32"},
        "layout": {"expert": 2},
        "data": {"train": str(folder / CHATS), "shuffle": False},
        "sft": {"batch_size": PROMPTS * GROUP_SIZE, "max_tokens": 1024},
        "optimizer": {"lr": LEARNING_RATE, "clip_grad": CLIP_GRAD, "betas": list(BETAS), "eps": EPS},
        "training": {"max_tokens_per_microbatch": 4096},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))
    run("grpo_mp.sft", [str(folder / "sft.yaml")], ranks, CORES // ranks)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["time/step_s"] for line in lines if (line["step"] or 0) > 1], {}


if __name__ == "__main__":
    main()
