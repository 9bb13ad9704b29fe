"""Speed of an engine with a small KV cache by `engine.concurrent_groups`: `python -m tests.bench.concurrency`.

A real SGLang server on the CPU generates steps of groups whose response lengths are lognormal, as a rollout does. The
cache holds about a tenth of a step's requests, so that many groups preempt each other, and few leave it empty.
Each repetition runs every fixed number and auto once, on the same server; auto has the experience of a step.
Rates are by wall time, and by CPU time of the engine's scheduler, which other work on the machine disturbs less.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch.distributed as dist

from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.concurrency import LaunchLimit
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask, RolloutWorker
from grpo_mp.utils.types import Prompt
from tests.engines import started_engine
from tests.rollout.fake_engine import NoScores
from tools.tiny.models import make_tiny, make_tokenizer

FIXED = (1, 2, 4, 8, 16, 32)
GROUPS = 32
GROUP_SIZE = 4
PROMPT_TOKENS = 16
LONGEST = 256
MEDIAN = 16
SIGMA = 1.2
CACHE_TOKENS = 1024
CONSERVATIVENESS = 0.14  # SGLang begins with a high reserve, and lowers it to this in 600 decode steps
LIMIT_S = 600.0


@dataclass(frozen=True)
class Run:
    tokens_per_s: float
    tokens_per_cpu_s: float
    metrics: dict[str, float]


class LongTailedClient(EngineClient):
    """Lets each response end at a length of its own, which the engine cannot foresee.

    Half of the vocabulary ends a response, and only from that length on.
    """

    vocabulary = 0

    async def _generate(self, body: dict[str, Any], count: int) -> Any:
        prompt = body["input_ids"]
        shared = body["sampling_params"] | {"n": 1, "stop_token_ids": list(range(self.vocabulary // 2))}
        items = [shared | {"min_new_tokens": length - 1} for length in draw_lengths(prompt, count)]
        return await super()._generate(body | {"input_ids": [prompt] * count, "sampling_params": items}, count)


def draw_lengths(prompt: Sequence[int], count: int) -> list[int]:
    draw = random.Random(str(prompt))
    return [max(2, min(LONGEST, round(draw.lognormvariate(0, SIGMA) * MEDIAN))) for _ in range(count)]


async def generate(client: EngineClient, scheduler: psutil.Process, limit: LaunchLimit, name: str) -> Run:
    """Generate a step. `name`: of the stream, unique."""
    draw = random.Random(0)
    prompts = [Prompt(i, "", tuple(draw.choices(range(100), k=PROMPT_TOKENS))) for i in range(GROUPS)]
    rule = AdmissionRule(GROUPS, GROUPS, GROUPS)
    task = RolloutTask(prompts.__getitem__, GROUP_SIZE, 0, 1, SamplingParams(LONGEST))
    tokenizer: Any = SimpleNamespace(get_added_vocab=dict, batch_decode=lambda tokens, **_: [""] * len(tokens))
    scorer: Any = NoScores()
    worker = RolloutWorker(client, scorer, tokenizer, LIMIT_S, lambda error: None, limit=limit)
    await client.flush_cache_when_idle()
    before_s = time.monotonic()
    used_s = sum(scheduler.cpu_times()[:2])
    launched = await worker.run(task, GroupStream(dist.HashStore(), name, rule), GROUPS)
    seconds = time.monotonic() - before_s
    used_s = sum(scheduler.cpu_times()[:2]) - used_s
    assert len(launched) == GROUPS
    tokens = sum(len(sample.tokens) for group in launched.values() for sample in group.samples)  # type: ignore[union-attr]
    return Run(tokens / seconds, tokens / used_s, limit.take_metrics())


async def measure(client: EngineClient, scheduler: psutil.Process, repetitions: int, fixed: Sequence[int]) -> None:
    numbers = (None, *fixed)  # None: auto
    limits = {groups: LaunchLimit(client.load, PROMPT_TOKENS + LONGEST, groups, GROUPS) for groups in numbers}
    runs: dict[int | None, list[Run]] = {groups: [] for groups in numbers}
    for repetition in range(-1, repetitions):  # the first warms up
        for groups, of_groups in runs.items():
            run = await generate(client, scheduler, limits[groups], f"{repetition}/{groups}")
            of_groups.extend([run] * (repetition >= 0))
            print(repetition, groups, round(run.tokens_per_s), round(run.tokens_per_cpu_s), run.metrics, flush=True)
            if repetition < 0:
                break
    wall = {groups: statistics.median(run.tokens_per_s for run in ran) for groups, ran in runs.items()}
    cpu = {groups: statistics.median(run.tokens_per_cpu_s for run in ran) for groups, ran in runs.items()}
    for groups, of_groups in runs.items():
        means = {name: statistics.fmean(run.metrics[name] for run in of_groups) for name in of_groups[0].metrics}
        shown = ", ".join(f"{name.partition('/')[2]} {value:.2f}" for name, value in means.items())
        speeds = [run.tokens_per_s for run in of_groups]
        spread = f"({min(speeds):.0f} to {max(speeds):.0f})"
        print(
            f"{groups or 'auto':>4} groups: {wall[groups]:6.0f} tokens/s {spread}, {cpu[groups]:6.0f} by CPU, {shown}"
        )
    for name, medians in {"wall": wall, "CPU": cpu}.items():
        ratio = medians[None] / max(medians[groups] for groups in fixed)
        print(f"auto / best fixed number by {name} time: {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--fixed", type=int, nargs="+", default=FIXED)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = make_tokenizer([])
        make_tiny(folder / "model", "qwen3_moe", tokenizer, 1)
        LongTailedClient.vocabulary = len(tokenizer)
        context = PROMPT_TOKENS + LONGEST
        args = {"max_total_tokens": CACHE_TOKENS, "schedule_conservativeness": CONSERVATIVENESS}
        spec = EngineSpec(0, 0, folder / "model", "float32", context_tokens=context, cpu=True, args=args)
        spec = replace(spec, save_tokenizer=tokenizer.save_pretrained)  # SGLang needs it for min_new_tokens
        with started_engine(spec, folder / "engine.log") as engine:
            engine.wait_ready(LIMIT_S)
            children = psutil.Process().children(recursive=True)
            (scheduler,) = (process for process in children if process.name().startswith("sglang::sch"))

            async def run() -> None:
                async with aclosing(LongTailedClient(0, engine.url, engine.headers, LIMIT_S)) as client:
                    await measure(client, scheduler, options.repetitions, options.fixed)

            asyncio.run(run())


if __name__ == "__main__":
    main()
