"""Compare the weights of data-parallel replicas by checksums, and name the ranks whose weights drifted.

Megatron's check_param_hashes_across_dp_replicas copies all weights to the host, needs CUDA, and assumes that the first
replica is right.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp import platform
from grpo_mp.distributed.process_groups import all_gather, replica_groups
from grpo_mp.policy.trained_model import TrainedModel
from grpo_mp.utils.errors import EarlyStopError
from grpo_mp.weight_sync.changes import CHUNK_WORDS, fingerprint, random_factors

NAMED = 3  # tensors named in a message

CHECK_EVERY = 20  # steps


def check_replicas(policy: TrainedModel, step: int, every: int = 1) -> None:
    """Compare the weights of a policy or critic, and its reference, between replicas if `every` divides `step`.

    Raise EarlyStopError on all ranks if they differ. Call this before an update, which gathers the weights from the
    optimizer's shards and so hides a drift.
    """
    if not every or step % every:
        return
    experts = {name for name, tensor in policy.tensors.items() if not getattr(tensor, "allreduce", True)}
    drifted: dict[int, list[str]] = {}
    for group, names in zip(replica_groups(), (policy.tensors.keys() - experts, experts), strict=True):
        tensors = _tensors(policy, names)
        if not (checksums := _fingerprints(group, tensors)):
            continue
        for rank, found in find_drifted(checksums, list(tensors)).items():
            drifted[rank] = [*drifted.get(rank, ()), *found]
    by_rank = {rank: names for found in all_gather(drifted, policy.parallel.cpu_group) for rank, names in found.items()}
    if by_rank:
        raise EarlyStopError(describe(step, by_rank))


def find_drifted(checksums: Mapping[int, Sequence[int]], names: Sequence[str]) -> dict[int, list[str]]:
    """Return rank -> names of tensors whose checksum differs from the majority of replicas; all ranks if there is none.

    `checksums`: rank of each replica -> checksums in the order of `names`.
    """
    drifted = dict[int, list[str]]()
    for name, column in zip(names, zip(*checksums.values(), strict=True), strict=True):
        value, count = Counter(column).most_common(1)[0]
        has_majority = 2 * count > len(column)
        for rank, checksum in zip(checksums, column, strict=True):
            if count < len(column) and not (has_majority and checksum == value):
                drifted.setdefault(rank, []).append(name)
    return drifted


def describe(step: int, drifted: Mapping[int, Sequence[str]]) -> str:
    """Return the error message on drifted weights. `drifted`: rank -> tensor names."""
    names = sorted(set().union(*drifted.values()))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"step {step}: rank {', '.join(map(str, sorted(drifted)))}: weights are not those of the other data-parallel "
        f"replicas, in {', '.join(names[:NAMED])}{more}: memory or network of the rank is faulty; leave its node out, "
        "and run the same command to resume from the last checkpoint"
    )


def _tensors(policy: TrainedModel, names: set[str]) -> dict[str, Tensor]:
    tensors = {name: policy.tensors[name] for name in sorted(names)}
    reference = policy.reference.host_tensors if policy.reference else {}
    return tensors | {f"{name} of the reference": reference[name] for name in tensors if name in reference}


def _fingerprints(group: dist.ProcessGroup, tensors: Mapping[str, Tensor]) -> dict[int, list[int]]:
    ranks = dist.get_process_group_ranks(group)
    if not tensors or len(ranks) == 1:
        return {}
    factors = {device: random_factors(CHUNK_WORDS).to(device) for device in {one.device for one in tensors.values()}}
    own = [fingerprint(tensor, factors[tensor.device]) for tensor in tensors.values()]
    table = [torch.empty(len(own), dtype=torch.int64, device=platform.device()) for _ in ranks]
    dist.all_gather(table, torch.tensor(own, dtype=torch.uint64).view(torch.int64).to(platform.device()), group=group)
    return {rank: row.tolist() for rank, row in zip(ranks, table, strict=True)}
