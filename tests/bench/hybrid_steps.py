"""Steps of a tiny Qwen3.5 mixture with three gated delta nets to an attention: `python -m tests.bench.hybrid_steps`.

train: an update of the policy on one rank beside transformers with the same weights, chats, loss and AdamW in float32,
whose losses must agree. Prompts have 256 tokens, answers 16 to 512; transformers gets the chats by length, so that
little is padding. Each side has micro-batches of two sizes, of which the better counts; the first update warms up.
decode: a step of an engine with 16 requests at once, beside Qwen3-MoE of the same size, which has attention in every
layer. All are medians of CPU seconds of one thread: of the update, and of the engine's scheduler.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from grpo_mp.config import check_sft_settings
from grpo_mp.data.sets import DataSet
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.trainer.sft_step import pack_samples, supervised_update
from grpo_mp.utils.types import Sample
from tests.bench.workload import BETAS, CLIP_GRAD, EPS, LEARNING_RATE, LONGEST, PROMPT_TOKENS, SHORTEST
from tests.engines import started_engine
from tests.one_rank import one_rank_job
from tools.tiny.models import make_tiny, make_tokenizer

FAMILIES = {  # of the same size; Qwen3.5 has a shared expert beside the 2 of 8 that a token takes
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "qwen3_moe": {"num_experts": 10, "num_experts_per_tok": 3},
}
CHATS = 32
UPDATES = 4
REQUESTS = 16
DECODED = 65
ROUNDS = 6
LIMIT_S = 300.0
Values = list[float]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {family: Path(scratch) / family for family in FAMILIES}
        for family, shape in FAMILIES.items():
            make_tiny(folders[family], family, make_tokenizer([]), **shape)
        compare_training(folders["qwen3_5_moe_text"], make_chats(CHATS))
        show("decode", {family: decode_seconds(folder) for family, folder in folders.items()}, REQUESTS)


def make_chats(count: int) -> list[Sample]:
    """Make chats of random tokens, whose answers are equally likely in every octave."""
    draw = random.Random(0)
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** (i / (count - 1))) for i in range(count)]
    tokens = [[draw.randrange(3, 100) for _ in range(PROMPT_TOKENS + length)] for length in lengths]
    return [Sample.from_tokens(i, row[:PROMPT_TOKENS], row[PROMPT_TOKENS:]) for i, row in enumerate(tokens)]


def show(phase: str, seconds: dict[str, Values], count: int) -> None:
    """Print the rate of each side in samples or tokens a second, and that of the first by that of the second."""
    medians = [statistics.median(values) for values in seconds.values()]
    for (name, values), median in zip(seconds.items(), medians, strict=True):
        spread = f"({min(values):.4f} to {max(values):.4f})"
        print(f"{phase} {name:18} {median:.4f} s {spread} {count / median:8.1f} a second")
    print(f"{phase} ratio {medians[1] / medians[0]:.2f}", flush=True)


def compare_training(folder: Path, chats: Sequence[Sample]) -> None:
    """Print the rates of both sides. Raises AssertionError if a loss differs."""
    seconds = dict[str, Values]()
    losses = list[Values]()
    sides = {"grpo_mp": (train_ours, (1024, 4096)), "transformers": (train_transformers, (2, 8))}
    for name, (train, sizes) in sides.items():
        runs = [train(folder, chats, size) for size in sizes]
        losses += [values for values, _ in runs]
        seconds[name] = min((times for _, times in runs), key=statistics.median)
    np.testing.assert_allclose(losses, [losses[0]] * len(losses), rtol=1e-4)
    show("train", seconds, len(chats))


def timed(update: Callable[[], float]) -> tuple[Values, Values]:
    """Return the losses of UPDATES updates, and the CPU seconds of all but the first."""
    losses = []
    times = [time.process_time()]
    for _ in range(UPDATES):
        losses.append(update())
        times.append(time.process_time())
    return losses, np.diff(times)[1:].tolist()


def train_ours(folder: Path, chats: Sequence[Sample], tokens: int) -> tuple[Values, Values]:
    tree = {
        "run": {"folder": "unused", "steps": UPDATES},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": "unused"},
        "sft": {"batch_size": len(chats), "max_tokens": PROMPT_TOKENS + LONGEST},
        "optimizer": {"lr": LEARNING_RATE, "clip_grad": CLIP_GRAD, "betas": list(BETAS), "eps": EPS},
    }
    sizes = np.array([[len(chat.prompt_tokens) + len(chat.tokens), len(chat.tokens)] for chat in chats])
    with one_rank_job() as parallel:
        policy = Policy(check_sft_settings(tree, "the benchmark"), parallel, with_reference=False)
        batch = pack_samples(DataSet("chats", [chats], sizes=sizes), range(len(chats)), tokens, policy)
        return timed(lambda: supervised_update(policy, batch)[1]["sft/loss"])


def train_transformers(folder: Path, chats: Sequence[Sample], sequences: int) -> tuple[Values, Values]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, EPS, weight_decay=0.0)
    learned = sum(len(chat.tokens) for chat in chats)
    rows = [torch.tensor(chat.prompt_tokens + chat.tokens) for chat in chats]  # the shortest first

    def update() -> float:
        loss = 0.0
        for part in (rows[start : start + sequences] for start in range(0, len(rows), sequences)):
            tokens = pad_sequence(part, batch_first=True)
            mask = pad_sequence([torch.ones_like(row) for row in part], batch_first=True)
            targets = tokens.masked_fill(mask == 0, -100)[:, PROMPT_TOKENS:]
            logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
            of_part = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / learned
            of_part.backward()
            loss += of_part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        adam.step()
        adam.zero_grad()
        return loss

    return timed(update)


def decode_seconds(folder: Path) -> Values:
    """Return CPU seconds of an engine's scheduler for a step of all requests, in each round after the first."""

    async def decode(engine: EngineProcess, scheduler: psutil.Process) -> Values:
        async with aclosing(EngineClient(0, engine.url, engine.headers, LIMIT_S)) as client:
            used = []
            for tokens in (1, DECODED) * ROUNDS:
                before = sum(scheduler.cpu_times()[:2])
                await client.generate(range(3, 67), SamplingParams(tokens, ignore_eos=True), REQUESTS)
                used.append(float(sum(scheduler.cpu_times()[:2])) - before)
            return [(most - one) / (DECODED - 1) for one, most in zip(used[2::2], used[3::2], strict=True)]

    spec = EngineSpec(index=0, rank=0, model=folder, dtype="float32", context_tokens=512, cpu=True)
    with started_engine(spec, folder / "engine.log") as engine:
        engine.wait_ready(LIMIT_S)
        children = psutil.Process().children(recursive=True)
        (scheduler,) = (process for process in children if process.name().startswith("sglang::sch"))
        return asyncio.run(decode(engine, scheduler))


if __name__ == "__main__":
    main()
