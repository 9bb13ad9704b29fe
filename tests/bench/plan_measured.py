"""What the planner says of one CPU rank beside what is measured: python -m tests.bench.plan_measured

A float32 policy of 46 million parameters goes through the phases of a step that a rank computes in, a save, an export
and a resume in the same layout and in another. Each line: the planned bytes of its weights, gradients and moments with
what the phase allocates beside them, the peak of resident memory above what the process held before there was a policy,
and their ratio. Gloo, unlike NCCL, copies what it gathers: the weights, after an update. glibc gives back at once what
is freed: what it would keep, the plan has as `fragments`, which are not compared. Exit status 1 where one is below 0.95
or above 1.02.
"""

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from grpo_mp.algorithms.supervised import token_mean_loss
from grpo_mp.checkpoint.chunk_files import TensorChunk, read_chunks
from grpo_mp.checkpoint.describe import OPTIMIZER_FOLDER
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import MemoryPlan, SubPhase, plan_memory, total_bytes
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.state_chunks import local_weight_chunks, optimizer_chunks
from grpo_mp.trainer.save import export_policy
from grpo_mp.weight_sync.compare import comparison_sequences
from grpo_mp.weight_sync.engine_check import PROMPTS, sequence_logprobs
from grpo_mp.weight_sync.update import PolicyShards, build_weight_sync
from tests.bench.small_policy import MIB, TOKENS, padding, peak_bytes, settled_bytes, start_small_policy
from tests.bench.sync_memory import StandIn, rollout_with
from tests.save_policy import save_policy

LEAST, MOST = 0.95, 1.02
OTHER_LAYOUT, EXPORT = "load, other layout", "export"
# Not in this process, or there before the policy is.
OTHERS = {"contexts", "communication", "fragments", "engine weights", "KV cache", "CUDA graphs"}


def main() -> None:
    """Command line; see the text above."""
    with start_small_policy() as (settings, parallel):
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
    # On a CPU it is written from its place, and what the same layout saved is read straight into that.
    kind = {OTHER_LAYOUT: "checkpoint", EXPORT: "export"}.get(name)
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
    sequences = comparison_sequences(TOKENS, TOKENS, 0, [(0,) * (settings.rollout.max_prompt_tokens // 2)] * PROMPTS)
    model, sync_bytes = settings.model, settings.sync.bucket_bytes
    batch = [padding(TOKENS)]
    policy.update(batch, token_mean_loss)  # moments are there from the first update on
    rollout = rollout_with(StandIn(), 1, runner)
    sync = build_weight_sync(settings, PolicyShards.of_policy(policy), rollout, parallel.job)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return {
            SubPhase.LOGPROB: peak_bytes(lambda: policy.logprobs(batch)),
            SubPhase.TRAIN: peak_bytes(lambda: policy.compute_gradients(batch, token_mean_loss)),
            SubPhase.OPTIMIZER: peak_bytes(policy.optimizer.step),
            SubPhase.SYNC: peak_bytes(lambda: (sync.update_weights(1), sequence_logprobs(policy, sequences))),
            SubPhase.SAVE: peak_bytes(lambda: save_policy(policy, folder)),
            EXPORT: peak_bytes(lambda: export_policy(policy, folder / EXPORT, model.path, sync_bytes)),
            SubPhase.LOAD: peak_bytes(lambda: load_policy(policy, folder)),
            OTHER_LAYOUT: peak_bytes(lambda: _load_half(policy, folder, settings.run.piece_bytes)),
        }


def _load_half(policy: Policy, folder: Path, piece_bytes: int) -> None:
    """Load half the columns of each tensor, as of some one of two ranks keeps, from the pieces that one rank saved.

    Half the rows would be read straight into their place.
    """
    read_chunks(_halves(local_weight_chunks(policy, policy.tensors)), folder, piece_bytes)
    read_chunks(_halves(optimizer_chunks(policy)), folder / OPTIMIZER_FOLDER, piece_bytes)


def _halves(chunks: Iterator[TensorChunk]) -> Iterator[TensorChunk]:
    return (replace(chunk, tensor=chunk.tensor[..., : -(-chunk.tensor.shape[-1] // 2)]) for chunk in chunks)


if __name__ == "__main__":
    main()
