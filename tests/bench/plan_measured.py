"""What the planner says of one CPU rank beside what is measured: python -m tests.bench.plan_measured

A float32 policy of 46 million parameters goes through the phases of a step that a rank computes in. Each line: the
planned bytes of its weights, gradients and moments with what the phase allocates beside them, the peak of resident
memory above what the process held before there was a policy, and their ratio. Gloo, unlike NCCL, copies what it
gathers: the weights, after an update. Exit status 1 where one is off by more than a tenth.
"""

import asyncio
import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from grpo_mp import platform
from grpo_mp.batching.microbatches import MicroBatchPlan
from grpo_mp.batching.packing import pack
from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.process_groups import (
    Parallel,
    single_rank_environment,
    start_parallel,
    stop_parallel,
)
from grpo_mp.examples.cold_start import negative_log_likelihood
from grpo_mp.examples.tiny_models import make_tiny, make_tokenizer
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import MemoryPlan, SubPhase, plan_memory, total_bytes
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.policy import Policy
from grpo_mp.types import MicroBatch
from grpo_mp.weight_sync.update import PolicyShards, build_weight_sync
from tests.bench.sync_memory import StandIn, reset_peak, status_bytes
from tests.save_policy import save_policy

REACH, MIB, TOKENS = 0.1, 2**20, 2048
# Not in this process, or there before the policy is.
OTHERS = {"contexts", "communication", "fragments", "engine weights", "KV cache", "CUDA graphs"}


def main() -> None:
    """Command line; see the text above."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, single_rank_environment():
        settings = _settings(Path(folder))
        shape = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 32768}
        make_tiny(Path(folder), "qwen3", make_tokenizer([]), **shape)
        memory = _plan(settings)
        measured = _measure(settings)
    ratios = []
    for sub_phase, peak in measured.items():
        plan = _planned(memory, sub_phase)
        ratios.append(plan / peak)
        print(f"{sub_phase:10} planned {plan / MIB:7.0f} MiB, measured {peak / MIB:7.0f} MiB, ratio {ratios[-1]:.3f}")
    raise SystemExit(any(abs(ratio - 1) > REACH for ratio in ratios))


def _settings(folder: Path) -> Settings:
    rollout = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 512, "max_response_tokens": 512}
    tree = {
        "run": {"folder": str(folder), "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": "none"},
        "rollout": rollout,
        "reward": {"answer": 1.0},
        "optimizer": {"lr": 1e-4},
        "training": {"max_tokens_per_microbatch": TOKENS, "recompute": "full"},
        "sync": {"bucket_bytes": "64MiB"},
    }
    return check_settings(tree, "bench")


def _plan(settings: Settings) -> MemoryPlan:
    return plan_memory(make_job(settings, HfConfig.read(settings.model.path), read_cluster("h100-80"), 1, 1))


def _planned(memory: MemoryPlan, sub_phase: SubPhase) -> float:
    device = {kind: size for kind, size in memory.device[0][sub_phase].items() if kind not in OTHERS}
    gathered = device["weights"] if sub_phase is SubPhase.OPTIMIZER else 0.0
    return total_bytes(device) + memory.host[sub_phase].get("checkpoint", 0.0) + gathered


def _measure(settings: Settings) -> Mapping[SubPhase, float]:
    """Highest resident bytes of each sub-phase above those before the policy."""
    parallel = start_parallel(settings.layout, 0, 60.0)
    with asyncio.Runner() as runner:
        _phases(settings, parallel, runner)  # loads every kernel, touches every library
        before = _settled()
        phases = _phases(settings, parallel, runner)
    stop_parallel()
    return {sub_phase: peak - before for sub_phase, peak in phases.items()}


def _phases(settings: Settings, parallel: Parallel, runner: asyncio.Runner) -> dict[SubPhase, int]:
    policy = Policy(settings, parallel, with_reference=False)
    batch = [_batch(TOKENS)]
    policy.update(batch, negative_log_likelihood)  # moments are there from the first update on
    rollout: Any = SimpleNamespace(host_ranks=(0,), client=StandIn(), call=runner.run)
    sync = build_weight_sync(settings, PolicyShards.of_policy(policy), rollout, parallel.job)
    with tempfile.TemporaryDirectory() as folder:
        peaks = {
            SubPhase.LOGPROB: _peak(lambda: policy.logprobs(batch)),
            SubPhase.TRAIN: _peak(lambda: policy.compute_gradients(batch, negative_log_likelihood)),
            SubPhase.OPTIMIZER: _peak(policy.optimizer.step),
            SubPhase.SYNC: _peak(lambda: sync.update_weights(1)),
            SubPhase.SAVE: _peak(lambda: save_policy(policy, Path(folder))),
            SubPhase.LOAD: _peak(lambda: load_policy(policy, Path(folder))),
        }
    return peaks


def _batch(tokens: int) -> MicroBatch:
    """Sequences of 128 tokens of padding: as much work and memory as real ones."""
    batch = pack({}, [], [], MicroBatchPlan(), align=1, pad_to=tokens)
    return replace(batch, lengths=(128,) * (tokens // 128), positions=torch.arange(128).repeat(tokens // 128))


def _settled() -> int:
    gc.collect()
    platform.free_device_memory()
    return platform.host_bytes()


def _peak(run: Callable[[], object]) -> int:
    """The highest resident memory while `run` runs."""
    _settled()
    process = psutil.Process()
    reset_peak(process)
    run()
    return status_bytes(process, "VmHWM")


if __name__ == "__main__":
    main()
