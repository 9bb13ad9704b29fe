"""Measure one engine: its decode rate beside SGLang's own benchmark, and its memory awake and asleep."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from grpo_mp import platform
from grpo_mp.config import Settings
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.clusters import OVERHEADS, Cluster
from grpo_mp.planner.engine_memory import EngineMemory, engine_memory
from grpo_mp.planner.job import make_job
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.engine_args import engine_environment
from grpo_mp.rollout.engine_layout import EnginePlacement
from grpo_mp.rollout.hosted_engine import START_TIMEOUT_S
from grpo_mp.rollout.reward_servers import MEMORY_TAGS
from grpo_mp.rollout.rollout import RolloutParts, base_spec, engine_spec
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import GIB

GB = 1e9
BENCHMARK = "sglang.benchmark.serving"
BENCHMARK_LIMIT_S = 600.0


@dataclass(frozen=True)
class Workload:
    """Sequences that one engine generates at once. `group_size`: responses to one prompt."""

    prompts: int
    group_size: int
    prompt_tokens: int
    response_tokens: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size

    @property
    def tokens(self) -> int:
        """Return the number of generated tokens."""
        return self.sequences * self.response_tokens


@dataclass(frozen=True)
class EngineRates:
    """Generated tokens per second by our client and by SGLang's benchmark, and memory in use [bytes]."""

    tokens_per_s: float
    benchmark_tokens_per_s: float
    awake: float
    asleep: float
    woken: float


def measure_engine(settings: Settings, workload: Workload, log: Path) -> EngineRates:
    """Start an engine of the settings' model on the first GPU, or on the CPU, and measure it.

    Memory is what the engine adds to the driver's figure for the whole GPU; on a CPU, the resident memory of its
    processes. After waking, the weights are undefined, so nothing is generated then.
    """
    unused: Any = None
    parts = RolloutParts(hf=HfConfig.read(settings.model.path), tokenizer=unused, scorer=unused)
    base = base_spec(settings.model, settings.max_request_tokens, settings.run.seed, rank=0)
    process = EngineProcess(
        engine_spec(base, EnginePlacement(0, 0, 0, 1), parts, settings.engine, settings.rollout), log
    )
    before = used_memory()
    process.start()
    try:
        process.wait_ready(START_TIMEOUT_S)
        return asyncio.run(_measure(process, workload, lambda: used_memory() - before, settings))
    finally:
        process.stop()


async def _measure(
    process: EngineProcess, workload: Workload, memory: Callable[[], float], settings: Settings
) -> EngineRates:
    limit_s = settings.rollout.group_timeout_s
    client = EngineClient(0, process.url, process.headers, limit_s)
    vocab_size = HfConfig.read(settings.model.path).int("vocab_size")
    try:
        await generate(client, workload, vocab_size)  # compiles kernels
        by_benchmark = run_benchmark(process, workload)
        started = time.monotonic()
        await generate(client, workload, vocab_size)
        seconds = time.monotonic() - started
        awake = memory()
        await client.release_memory(MEMORY_TAGS)
        asleep = memory()
        await client.resume_memory(MEMORY_TAGS)
        return EngineRates(workload.tokens / seconds, by_benchmark, awake, asleep, memory())
    finally:
        await client.aclose()


async def generate(client: EngineClient, workload: Workload, vocab_size: int) -> None:
    """Generate the workload as the trainer does: one request per group, with the logprobs of all tokens."""
    sampling = SamplingParams(workload.response_tokens, ignore_eos=True)
    prompts = torch.randint(vocab_size, (workload.prompts, workload.prompt_tokens)).tolist()
    await asyncio.gather(*(client.generate(prompt, sampling, workload.group_size) for prompt in prompts))


def run_benchmark(process: EngineProcess, workload: Workload) -> float:
    """Return the generated tokens per second that SGLang's own benchmark reports of this engine."""
    spec = process.spec
    result = process.log.with_suffix(".benchmark.jsonl")
    result.unlink(missing_ok=True)
    sizes = {
        "random-input-len": workload.prompt_tokens,
        "random-output-len": workload.response_tokens,
        "random-range-ratio": 1.0,  # all sequences have these lengths
        "num-prompts": workload.sequences,
        "warmup-requests": 1,
    }
    command = [sys.executable, "-m", BENCHMARK, "--backend=sglang", f"--base-url={process.url}"]
    command += ["--dataset-name=random-ids", "--tokenize-prompt", f"--tokenizer={spec.model}", "--disable-tqdm"]
    command += [*(f"--{name}={value}" for name, value in sizes.items()), f"--output-file={result}"]
    environment = engine_environment(spec, {}, str(result.parent), os.environ)
    environment["OPENAI_API_KEY"] = process.api_key
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BENCHMARK_LIMIT_S)
    result.with_suffix(".log").write_text(ended.stdout + ended.stderr)
    if ended.returncode or not result.is_file():
        raise UserError(f"SGLang's benchmark {BENCHMARK} failed: see {result.with_suffix('.log')}")
    report = json.loads(result.read_text())
    if report["total_output_tokens"] != workload.tokens:
        counted = f"{report['total_output_tokens']} of {workload.tokens} tokens"
        raise UserError(f"SGLang's benchmark got {counted}: see {result.with_suffix('.log')}")
    return float(report["output_throughput"])


def used_memory() -> float:
    """Return the bytes in use on the first GPU by the driver's count; on a CPU, of this process's children."""
    if platform.on_cuda():
        return platform.used_device_bytes()
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


def planned_engine(settings: Settings, cluster: Cluster) -> EngineMemory:
    """Return the memory that a plan counts for the settings' engine."""
    return engine_memory(make_job(settings, HfConfig.read(settings.model.path), cluster, nodes=1))


def check_sleep(rates: EngineRates, planned: EngineMemory) -> None:
    """Check that a sleeping engine on a GPU keeps at most what a plan counts: its context and communicators."""
    limit = OVERHEADS.cuda_context + planned.communication
    if platform.on_cuda() and rates.asleep > limit:
        raise UserError(
            f"an engine that sleeps keeps {rates.asleep / GIB:.2f} GiB of its GPU, and plans count {limit / GIB:.2f}: "
            "the trainer gets out of memory where a plan says that it fits"
        )


def decode_gb_s(rates: EngineRates, workload: Workload, planned: EngineMemory, layers: int) -> float | None:
    """Return the rate at which decoding reads weights and KV cache [GB/s], as a plan counts them.

    None where the launches of kernels, which a plan counts apart, take all the time.
    """
    context = workload.prompt_tokens + workload.response_tokens / 2
    nbytes = planned.weights + workload.sequences * context * planned.bytes_per_token
    seconds = workload.sequences / rates.tokens_per_s - layers * OVERHEADS.decode_layer_s
    return nbytes / seconds / GB if seconds > 0 else None


def describe(rates: EngineRates) -> str:
    """Return the measurements as text."""
    ratio = rates.tokens_per_s / rates.benchmark_tokens_per_s
    decoding = f"decode {rates.tokens_per_s:.0f} tokens/s, {ratio:.2f} of SGLang's own benchmark"
    awake, asleep, woken = (f"{size / GIB:.2f}" for size in (rates.awake, rates.asleep, rates.woken))
    where = "of the GPU" if platform.on_cuda() else "of host memory, which engines on CPUs keep"
    return f"{decoding}; {awake} GiB awake, {asleep} asleep, {woken} woken, {where}"
