"""One process of TRL's side: GRPOTrainer with transformers' generation, responses of given lengths; or SFTTrainer.

Started by compare_trl.py and sft_beside_trl.py, alone or by torchrun; rank 0 writes the seconds of each step after the
first to RESULT.
"""

import argparse
import json
import os
import runpy
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import grpo_mp.platform
from tests.bench import workload as w

if not torch.cuda.is_available():
    # TRL imports torchvision, whose wheel is built for CUDA: the CPU engines' start-up hook lets it import.
    runpy.run_path(str(Path(grpo_mp.platform.__file__).parent / "engine_site" / "sitecustomize.py"))

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


class ExactLengths(LogitsProcessor):
    """Forbids the end token before a row's length and demands it there."""

    def __init__(self, lengths: list[int], prompt_tokens: int, end: int) -> None:
        self.last = torch.tensor(lengths) - 1
        self.prompt_tokens = prompt_tokens
        self.end = end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_last = self.last == input_ids.shape[1] - self.prompt_tokens
        scores[:, self.end] = torch.where(is_last, 1e9, -torch.inf)
        return scores


class StepClock(TrainerCallback):
    """The time at which each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def force_lengths(model: Any, tokenizer: Any, lengths: w.Lengths) -> None:
    """Make `model.generate` end every row at its length; rows of one prompt take its lengths in turn."""
    generate = model.generate

    def exact(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen: Counter[str] = Counter()
        row_lengths = []
        for text in tokenizer.batch_decode(input_ids, skip_special_tokens=True):
            prompt = next(question for question in lengths if question in text)
            row_lengths.append(lengths[prompt][seen[prompt]])
            seen[prompt] += 1
        processor = ExactLengths(row_lengths, input_ids.shape[1], tokenizer.eos_token_id)
        result: torch.Tensor = generate(input_ids=input_ids, logits_processor=[processor], **kwargs)
        return result

    model.generate = exact


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 100 for ids in completion_ids]


def arguments(given: argparse.Namespace) -> dict[str, Any]:
    """One update per step, as the other side; nothing is logged or saved."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return {
        "output_dir": str(given.folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": given.micro_batch,
        "gradient_accumulation_steps": w.read_sizes(given.folder).samples // (given.micro_batch * processes),
        "router_aux_loss_coef": 0.0,
        "learning_rate": w.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": w.CLIP_GRAD,
        "adam_beta1": w.BETAS[0],
        "adam_beta2": w.BETAS[1],
        "adam_epsilon": w.EPS,
        "max_steps": given.steps,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--chats", help="a file of the folder: fine-tune on it")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.folder / w.MODEL)
    model = AutoModelForCausalLM.from_pretrained(given.folder / w.MODEL, dtype=torch.float32)
    clock = StepClock()
    same: dict[str, Any] = {"model": model, "processing_class": tokenizer, "callbacks": [clock]}
    if given.chats:
        rows = [json.loads(row) for row in (given.folder / given.chats).read_text().splitlines()]
        config = SFTConfig(**arguments(given), completion_only_loss=True, max_length=None)
        SFTTrainer(args=config, train_dataset=Dataset.from_list(rows), **same).train()
    else:
        force_lengths(model, tokenizer, w.read_lengths(given.folder))
        rows = [{"prompt": [{"role": "user", "content": question}]} for question in w.read_questions(given.folder)]
        config = GRPOConfig(
            **arguments(given),
            num_generations=w.read_sizes(given.folder).group_size,
            max_completion_length=w.read_sizes(given.folder).longest,
            beta=w.KL_WEIGHT,
            loss_type="grpo",
        )
        GRPOTrainer(reward_funcs=length_reward, args=config, train_dataset=Dataset.from_list(rows), **same).train()
    if int(os.environ.get("RANK", 0)) == 0:
        given.result.write_text(json.dumps([end - start for start, end in pairwise(clock.ends)]))


if __name__ == "__main__":
    main()
