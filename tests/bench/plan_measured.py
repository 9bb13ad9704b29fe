"""What the planner says of one CPU rank beside what is measured: python -m tests.bench.plan_measured [--critic]

A float32 policy of 46 million parameters goes through the phases of a step that a rank computes in, a save, an export
and a resume in the same layout and in another. Each line: the planned bytes of its weights, gradients and moments with
what the phase allocates beside them, the peak of resident memory above what the process held before there was a policy,
and their ratio. Gloo, unlike NCCL, copies what it gathers: the weights, after an update. glibc gives back at once what
is freed: what it would keep, the plan has as `fragments`, which are not compared. Exit status 1 where one is below 0.95
or above 1.02.

With --critic PPO's critic, as large, stands beside the policy, and the phases that it takes part in are of both, the
policy first.
"""

import argparse
import asyncio
import base64
import ctypes
import gc
import pickle
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor

from grpo_mp import platform
from grpo_mp.algorithms.losses import token_mean_loss
from grpo_mp.batching.microbatches import MicroBatchPlan
from grpo_mp.batching.packing import pack
from grpo_mp.checkpoint.chunk_files import OPTIMIZER_FOLDER, TensorChunk, read_chunks
from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.process_groups import Parallel, single_rank_environment, start_parallel, stop_parallel
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import MemoryPlan, SubPhase, plan_memory, total_bytes
from grpo_mp.policy.checkpoint import load_policy, local_weight_chunks, optimizer_chunks
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.trained_model import TrainedModel
from grpo_mp.rollout.shared_memory import open_exports
from grpo_mp.trainer.engine_check import sequence_logprobs
from grpo_mp.trainer.save import export_policy
from grpo_mp.utils.types import MicroBatch
from grpo_mp.weight_sync.compare import MAX_TEXTS, comparison_sequences
from grpo_mp.weight_sync.update import PolicyShards, build_weight_sync
from tests.save_policy import save_policy
from tools.tiny.models import make_tiny, make_tokenizer

LEAST = 0.95
MOST = 1.02
MIB = 2**20
TOKENS = 2048
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 32768}
# Of malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
GIVEN_BACK = 2**17  # bytes from which on glibc gives back what is freed
OTHER_LAYOUT = "load, other layout"
EXPORT = "export"
PPO: Mapping[str, Any] = {"algorithm": {"preset": "ppo", "kl": {"coef": 0.0}}, "critic": {"lr": 1e-4}}
# Not in this process, or there before the policy is.
OTHERS = {"contexts", "communication", "fragments", "engine weights", "KV cache", "CUDA graphs"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--critic", action="store_true")
    given = parser.parse_args()
    with start_small_policy(**PPO if given.critic else {}) as (settings, parallel):
        memory = _plan(settings)
        measured = _measure(settings, parallel)
    ratios = []
    for name, peak in measured.items():
        plan = _planned(memory, name)
        ratios.append(plan / peak)
        print(f"{name:20} planned {plan / MIB:7.0f} MiB, measured {peak / MIB:7.0f} MiB, ratio {ratios[-1]:.3f}")
    raise SystemExit(not all(LEAST <= ratio <= MOST for ratio in ratios))


def _plan(settings: Settings) -> MemoryPlan:
    return plan_memory(make_job(settings, HfConfig.read(settings.model.path), read_cluster("h100-80"), 1, 1))


def _planned(memory: MemoryPlan, name: str) -> float:
    sub_phase = {OTHER_LAYOUT: SubPhase.LOAD, EXPORT: SubPhase.SAVE}.get(name) or SubPhase(name)
    device = {kind: size for kind, size in memory.device[0][sub_phase].items() if kind not in OTHERS}
    gathered = device["weights"] if sub_phase is SubPhase.OPTIMIZER else 0.0
    # On a CPU a save writes from the weights' own place; a load reads a piece at a time.
    kind = {SubPhase.LOAD: "checkpoint", OTHER_LAYOUT: "checkpoint", EXPORT: "export"}.get(name)
    piece = memory.host[sub_phase][kind] if kind else 0.0
    return total_bytes(device) + piece + gathered


def _measure(settings: Settings, parallel: Parallel) -> Mapping[str, float]:
    """Highest resident bytes of each sub-phase above those before the policy."""
    with asyncio.Runner() as runner:
        _phases(settings, parallel, runner)  # loads every kernel, touches every library
        before = settled_bytes()
        phases = _phases(settings, parallel, runner)
    return {name: peak - before for name, peak in phases.items()}


def _phases(settings: Settings, parallel: Parallel, runner: asyncio.Runner) -> dict[str, int]:
    policy = Policy(settings, parallel, with_reference=False)
    models: list[Policy | Critic] = [policy, *([Critic(settings.for_critic(), parallel)] if settings.critic else [])]
    sequences = comparison_sequences([(0,) * (settings.rollout.max_prompt_tokens // 2)] * MAX_TEXTS, TOKENS)
    model = settings.model
    sync_bytes = settings.sync.bucket_bytes
    _compute_gradients(models)
    _step(models)  # moments are there from the first update on
    rollout = rollout_with(FakeEngine(), 1, runner)
    sync = build_weight_sync(
        settings.engine, model, settings.sync, PolicyShards.of_policy(policy), rollout=rollout, job=parallel.job
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = [folder / str(number) for number in range(len(models))]
        for each in folders:
            each.mkdir()
        return {
            SubPhase.LOGPROB: peak_bytes(lambda: _compute_outputs(models)),
            SubPhase.TRAIN: peak_bytes(lambda: _compute_gradients(models)),
            SubPhase.OPTIMIZER: peak_bytes(lambda: _step(models)),
            SubPhase.SYNC: peak_bytes(lambda: (sync.update_weights(1), sequence_logprobs(policy, sequences))),
            SubPhase.SAVE: peak_bytes(lambda: deque(map(save_policy, models, folders), 0)),
            EXPORT: peak_bytes(lambda: export_policy(policy, folder / EXPORT, model.path, sync_bytes)),
            SubPhase.LOAD: peak_bytes(lambda: deque(map(load_policy, models, folders), 0)),
            OTHER_LAYOUT: peak_bytes(lambda: deque(map(_load_half, models, folders), 0)),
        }


def _compute_outputs(models: Sequence[Policy | Critic]) -> None:
    for model in models:
        _ = model.values([padding(TOKENS)]) if isinstance(model, Critic) else model.logprobs([padding(TOKENS)])


def _compute_gradients(models: Sequence[Policy | Critic]) -> None:
    for model in models:
        if isinstance(model, Critic):
            model.compute_gradients([padding(TOKENS)], _squared_values)
        else:
            model.compute_gradients([padding(TOKENS)], token_mean_loss)


def _squared_values(values: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    loss = values.square().mean()
    return loss, loss.detach()


def _step(models: Sequence[Policy | Critic]) -> None:
    for model in models:
        model.optimizer.step()


def _load_half(policy: TrainedModel, folder: Path) -> None:
    """Load half the columns of each tensor, as of some one of two ranks keeps, from the pieces that one rank saved.

    Half the rows would be read straight into their place.
    """
    read_chunks(_halves(local_weight_chunks(policy, policy.tensors)), folder)
    read_chunks(_halves(optimizer_chunks(policy)), folder / OPTIMIZER_FOLDER)


def _halves(chunks: Iterator[TensorChunk]) -> Iterator[TensorChunk]:
    return (replace(chunk, tensor=chunk.tensor[..., : -(-chunk.tensor.shape[-1] // 2)]) for chunk in chunks)


@contextmanager
def start_small_policy(**changes: Any) -> Iterator[tuple[Settings, Parallel]]:
    """Make the model's folder and the groups of one rank; memory that is freed is given back at once.

    `changes`: sections of the settings.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, GIVEN_BACK)
    assert libc.mallopt(M_TRIM_THRESHOLD, GIVEN_BACK)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, single_rank_environment():
        settings = settings_of(Path(folder), **changes)
        make_tiny(Path(folder), "qwen3", make_tokenizer([]), **SHAPE)
        parallel = start_parallel(settings.layout, 0, 60.0)
        yield settings, parallel
        stop_parallel()


def settings_of(folder: Path, **changes: Any) -> Settings:
    rollout = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 512, "max_response_tokens": 512}
    tree = {
        "run": {"folder": str(folder), "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": "none"},
        "rollout": rollout,
        "reward": {"answer": 1.0},
        "optimizer": {"lr": 1e-4},
        "training": {"max_tokens_per_microbatch": TOKENS, "recompute": "full"},
        "sync": {"bucket_bytes": "256MiB"},
    }
    return check_settings(tree | changes, "bench")


def padding(tokens: int) -> MicroBatch:
    """Sequences of 128 tokens of padding: as much work and memory as real ones."""
    batch = pack({}, [], [], MicroBatchPlan(), align=1, pad_to=tokens)
    return replace(batch, lengths=(128,) * (tokens // 128), positions=torch.arange(128).repeat(tokens // 128))


def settled_bytes() -> int:
    """Resident memory of this process when all that is unused is given back."""
    gc.collect()
    platform.free_device_memory()
    return platform.host_bytes()


def peak_bytes(run: Callable[[], object]) -> int:
    settled_bytes()
    process = psutil.Process()
    reset_peak(process)
    run()
    return status_bytes(process, "VmHWM")


def reset_peak(process: psutil.Process) -> int:
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return status_bytes(process, "VmRSS")


def status_bytes(process: psutil.Process, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    assert match, f"no {field} in the status of process {process.pid}"
    return int(match.group(1)) * 1024


class FakeEngine:
    """Opens what an engine would load, without reading: the rank's memory would count twice what it reads."""

    index = 0

    async def begin_weight_update(self, with_draft: bool = False) -> None: ...

    async def update_weights_from_tensor(self, payloads: list[str], load_format: str | None = None) -> None:
        for payload in payloads:
            ((_, note),) = pickle.loads(base64.b64decode(payload))
            dict(open_exports(note))

    async def end_weight_update(self, version: int, keep_cache: bool = False) -> None: ...


def rollout_with(client: Any, ranks: int, runner: asyncio.Runner) -> Any:
    keeps = partial(nullcontext, client)
    return SimpleNamespace(
        host_ranks=range(ranks), client=client, call=runner.run, losing_engine=keeps, owns_devices=False
    )


if __name__ == "__main__":
    main()
