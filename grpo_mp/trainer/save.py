"""Checkpoints and the final Hugging Face folder."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mp.checkpoint.hf_writer import write_hf
from grpo_mp.checkpoint.manifest import Files
from grpo_mp.checkpoint.non_policy_tensors import read_non_policy_tensors
from grpo_mp.checkpoint.run_state import (
    begin_checkpoint,
    checkpoint_folder,
    own_checksums,
    prune_checkpoints,
    write_manifest,
)
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.phases import Phase
from grpo_mp.policy.checkpoint import save_policy, save_reference
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.context import TrainContext
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.update import make_plan


def save(session: TrainContext) -> Path:
    """Save the run as it stands between two steps; the checkpoint counts once its manifest is written."""
    folder = checkpoint_folder(session.settings.run.folder, session.state.step)
    with session.scheduler.phase(Phase.SAVE):
        if session.is_first:
            begin_checkpoint(folder)
            (folder / "policy").mkdir()
            if session.state.reference_refreshed:
                (folder / "reference").mkdir()
        dist.barrier(group=session.parallel.cpu_group)
        save_policy(session.policy, folder / "policy")
        if session.state.reference_refreshed:
            save_reference(session.policy, folder / "reference")
        dist.barrier(group=session.parallel.cpu_group)
        files = _checksums(folder, session.parallel)
        if session.is_first:
            write_manifest(folder, session.state, files)
            prune_checkpoints(session.settings.run.folder, session.settings.run.keep_checkpoints)
    return folder


def _checksums(folder: Path, parallel: Parallel) -> Files:
    """Of every file of a checkpoint, on the first rank; each rank reads its own. Every rank must call this."""
    found: list[Files] | None = [{}] * parallel.world_size if parallel.rank == 0 else None
    mine = own_checksums(folder, parallel.rank, parallel.world_size)
    dist.gather_object(mine, found, dst=0, group=parallel.cpu_group)
    return {name: held for files in found or () for name, held in files.items()}


def export_hf(session: TrainContext, folder: Path) -> None:
    """Write the session's policy as a Hugging Face folder."""
    settings = session.settings
    with session.scheduler.phase(Phase.SAVE, "export"):
        export_policy(session.policy, folder, settings.model.path, settings.sync.bucket_bytes)


def export_policy(policy: Policy, folder: Path, like: Path, bucket_bytes: int) -> None:
    """Write a policy as a Hugging Face folder: config, tokenizer, template and what is no part of the policy
    (multi-token prediction) from `like`, new weights.

    Every rank must call this; the first writes, a bucket at a time.
    """
    group, is_first = policy.parallel.cpu_group, policy.parallel.rank == 0
    dtype = policy.config.params_dtype
    plan = make_plan(policy.params, policy.local_shards(), (0,), bucket_bytes, dtype, group)
    resharder = Resharder(plan, policy.params, policy.tensors, policy.tp_sizes(), is_first)
    tensors = (pair for bucket in resharder.buckets() for pair in _on_host(bucket))
    if is_first:
        write_hf(folder, chain(tensors, read_non_policy_tensors(like, policy.hf)), like=like)
    else:
        for _ in tensors:  # this rank's shards travel as the first rank asks for them
            raise AssertionError("only the first rank receives tensors")
    dist.barrier(group=group)


def _on_host(bucket: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor.to("cpu", copy=True)) for name, tensor in bucket)
