"""One process of TRL's side: GRPOTrainer with transformers' generation, responses of given lengths.

Started by beside_trl.py, alone or by torchrun.
"""

import argparse
import json
import os
import runpy
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback

import grpo_mp.platform
from tests.bench.workload import (
    BETAS,
    CLIP_GRAD,
    EPS,
    GROUP_SIZE,
    KL_WEIGHT,
    LEARNING_RATE,
    LONGEST,
    MODEL,
    PROMPTS,
    read_lengths,
    read_questions,
)


gen_cpu=[]
class ExactLengths(LogitsProcessor):
    """Forbids the end token before a row's length and demands it there."""

    def __init__(self, lengths: list[int], prompt_tokens: int, end: int) -> None:
        self.last, self.prompt_tokens, self.end = torch.tensor(lengths) - 1, prompt_tokens, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        here = self.last == input_ids.shape[1] - self.prompt_tokens
        scores[:, self.end] = torch.where(here, 1e9, -torch.inf)
        return scores


class StepClock(TrainerCallback):
    """The time at which each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []; self.cpu: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter()); self.cpu.append(time.process_time())


def force_lengths(model: Any, tokenizer: Any, lengths: dict[str, list[int]]) -> list[float]:
    """Make `model.generate` end every row at its length; returns the list that its seconds are added to."""
    by_prompt = {question: lengths[question] for question in lengths}
    generate, seconds = model.generate, []

    def timed(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        start = time.perf_counter(); c0=time.process_time()
        seen: Counter[str] = Counter()
        wanted = []
        for row in tokenizer.batch_decode(input_ids, skip_special_tokens=True):
            wanted.append(by_prompt[row][seen[row]])
            seen[row] += 1
        processor = ExactLengths(wanted, input_ids.shape[1], tokenizer.eos_token_id)
        result: torch.Tensor = generate(input_ids=input_ids, logits_processor=[processor], **kwargs)
        seconds.append(time.perf_counter() - start); gen_cpu.append(time.process_time()-c0)
        return result

    model.generate = timed
    return seconds


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / LONGEST for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--experts", default=None)
    parser.add_argument("--attn", default=None)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(given.folder / MODEL)
    kw = {"experts_implementation": given.experts} if given.experts else {}
    if given.attn: kw["attn_implementation"] = given.attn
    model = AutoModelForCausalLM.from_pretrained(given.folder / MODEL, dtype=torch.float32, **kw)
    lengths = read_lengths(given.folder)
    generate_s = force_lengths(model, tokenizer, lengths)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    config = GRPOConfig(
        output_dir=str(given.result.parent / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=given.micro_batch,
        gradient_accumulation_steps=PROMPTS * GROUP_SIZE // (given.micro_batch * processes),
        num_generations=GROUP_SIZE,
        max_completion_length=LONGEST,
        beta=KL_WEIGHT,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_GRAD,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        loss_type="grpo",
        router_aux_loss_coef=0.0,
        max_steps=given.steps,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        shuffle_dataset=False,
        model_init_kwargs=kw or None,
    )
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in read_questions(given.folder)]
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=length_reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        steps = [b - a for a, b in zip(clock.ends, clock.ends[1:])]
        m = trainer._metrics["train"]
        given.result.write_text(json.dumps({"steps_s": steps, "generate_s": generate_s, "mean_len": m["completions/mean_length"], "cpu": [b-a for a,b in zip(clock.cpu,clock.cpu[1:])], "gen_cpu": gen_cpu, "kl": m.get("kl")}))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        # TRL imports torchvision, whose wheel is built for CUDA: the CPU engines' start-up hook lets it import.
        runpy.run_path(str(Path(grpo_mp.platform.__file__).parent / "engine_site" / "sitecustomize.py"))
    main()
