"""Save checkpoints and the final Hugging Face folder."""

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import read_non_policy_tensors
from grpo_mp.checkpoint.hf_writer import begin_hf, complete_hf, write_shards
from grpo_mp.checkpoint.manifest import Files
from grpo_mp.checkpoint.run_state import (
    TrainState,
    begin_checkpoint,
    checkpoint_folder,
    own_checksums,
    prune_checkpoints,
    write_manifest,
)
from grpo_mp.config.sections import RunConfig
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.policy.checkpoint import save_policy, save_reference
from grpo_mp.policy.policy import Policy
from grpo_mp.weight_sync.plan import Atom, atoms_of
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.update import plan_rounds
from grpo_mp.weight_sync.wire import WireFormat


def save_checkpoint(run: RunConfig, policy: Policy, state: TrainState) -> None:
    """Save the state of the run between two steps; the checkpoint counts once its manifest is written.

    Every rank must call this.
    """
    folder, parallel = checkpoint_folder(run.folder, state.step), policy.parallel
    if parallel.rank == 0:
        begin_checkpoint(folder)
        (folder / "policy").mkdir()
        if state.reference_updated:
            (folder / "reference").mkdir()
    dist.barrier(group=parallel.cpu_group)
    save_policy(policy, folder / "policy")
    if state.reference_updated:
        save_reference(policy, folder / "reference")
    dist.barrier(group=parallel.cpu_group)
    files_by_rank: list[Files] | None = [{}] * parallel.world_size if parallel.rank == 0 else None
    own_files = own_checksums(folder, parallel.rank, parallel.world_size)  # each rank reads those that it wrote
    dist.gather_object(own_files, files_by_rank, dst=0, group=parallel.cpu_group)
    if files_by_rank:
        write_manifest(folder, state, {name: entry for files in files_by_rank for name, entry in files.items()})
        prune_checkpoints(run.folder, run.keep_checkpoints)


def export_policy(policy: Policy, folder: Path, like: Path, bucket_bytes: int, fp8: bool = False) -> None:
    """Write a policy as a Hugging Face folder: config, tokenizer, template and what is no part of the policy
    (multi-token prediction) from `like`, new weights, as blockwise FP8 with `fp8`.

    Every rank must call this, and writes its share.
    """
    parallel, group = policy.parallel, policy.parallel.cpu_group
    wire = WireFormat(policy.params, policy.tp_sizes(), policy.config.params_dtype, fp8)
    rounds = plan_rounds(wire, policy.local_shards(), export_writers(wire, parallel.world_size), bucket_bytes, parallel)
    resharder = Resharder(rounds, wire, policy.tensors)
    tensors: Iterable[tuple[str, Tensor]] = (
        (name, tensor.to("cpu", copy=True)) for round_ in rounds for name, tensor in resharder.stage(round_)
    )
    if parallel.rank == 0:
        begin_hf(folder)
        tensors = chain(tensors, read_non_policy_tensors(like, policy.hf, fp8))
    dist.barrier(group=group)
    shards = all_gather(write_shards(folder, tensors, parallel.rank), group)
    if parallel.rank == 0:
        complete_hf(folder, list(chain.from_iterable(shards)), like, fp8)
    dist.barrier(group=group)


def export_writers(wire: WireFormat, world_size: int) -> Callable[[Atom], tuple[int, ...]]:
    """Return which rank writes an atom, so that all write about as many bytes."""
    written = [0] * world_size
    writers: dict[Atom, tuple[int, ...]] = {}
    for atom in atoms_of(wire.params):
        rank = written.index(min(written))
        written[rank] += sum(map(wire.sizes.staged, atom.names))
        writers[atom] = (rank,)
    return writers.__getitem__
