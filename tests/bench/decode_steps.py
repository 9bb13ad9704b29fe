"""Decode steps of a CPU engine by batch size: `python -m tests.bench.decode_steps`.

CPU milliseconds of the engine's scheduler for one step of all requests, after prompts of 256 tokens, in float32 on one
thread; medians of rounds. What a step of one request costs is paid by every step: the Python of SGLang and the calls
of torch. The rest grows with the requests: it is arithmetic and memory. The last column is the part of the first in a
step of the comparison with TRL (tests/bench/compare_trl.py), whose responses end one after another: an engine has half
of them, and each step as many requests as are longer than it.
"""

import asyncio
import statistics
import tempfile
from contextlib import aclosing
from pathlib import Path

import psutil
import torch

from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from tests.bench.compare_trl import TINY
from tests.bench.workload import LONGEST, PROMPT_TOKENS, make_workload
from tests.engines import started_engine

REQUESTS = (1, 8, 64)
DECODED = 65
ROUNDS = 5
ENGINES = 2
LIMIT_S = 300.0


def main() -> None:
    torch.set_num_threads(1)
    for family in TINY:
        with tempfile.TemporaryDirectory() as scratch:
            lengths = [length for of in make_workload(Path(scratch), family, 0).values() for length in of]
            costs = step_milliseconds(Path(scratch) / "model")
        fixed = costs[1]
        slope = (costs[64] - fixed) / 63
        running = [sum(length > step for length in lengths) / ENGINES for step in range(max(lengths))]
        total = sum(fixed + slope * (count - 1) for count in running)
        shown = ", ".join(f"{requests} requests {cost:.1f}" for requests, cost in costs.items())
        mean = statistics.fmean(running)
        print(
            f"{family}: {shown} ms; {mean:.0f} requests on average, {fixed * len(running) / total:.0%} fixed",
            flush=True,
        )


def step_milliseconds(folder: Path) -> dict[int, float]:
    """Return the CPU milliseconds of a decode step by the number of requests."""

    async def measure(engine: EngineProcess, scheduler: psutil.Process) -> dict[int, float]:
        async with aclosing(EngineClient(0, engine.url, engine.headers, LIMIT_S)) as client:
            return {requests: await decode(client, scheduler, requests) for requests in REQUESTS}

    spec = EngineSpec(index=0, rank=0, model=folder, dtype="float32", context_tokens=PROMPT_TOKENS + LONGEST, cpu=True)
    with started_engine(spec, folder / "engine.log") as engine:
        engine.wait_ready(LIMIT_S)
        children = psutil.Process().children(recursive=True)
        (scheduler,) = (process for process in children if process.name().startswith("sglang::sch"))
        return asyncio.run(measure(engine, scheduler))


async def decode(client: EngineClient, scheduler: psutil.Process, requests: int) -> float:
    """Return the median CPU milliseconds of a step of `requests` at once; the first round warms up."""
    prompt = [3 + place % 90 for place in range(PROMPT_TOKENS)]
    used = list[float]()
    for tokens in (1, DECODED) * ROUNDS:
        before = sum(scheduler.cpu_times()[:2])
        await client.generate(prompt, SamplingParams(tokens, ignore_eos=True), requests)
        used.append(float(sum(scheduler.cpu_times()[:2])) - before)
    pairs = zip(used[2::2], used[3::2], strict=True)
    return 1000 * statistics.median((most - one) / (DECODED - 1) for one, most in pairs)


if __name__ == "__main__":
    main()
