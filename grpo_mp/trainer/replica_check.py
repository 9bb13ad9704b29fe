"""Compare the weights of data-parallel replicas by checksums, and name the rank whose weights drifted.

Megatron's check_param_hashes_across_dp_replicas copies all weights to the host, needs CUDA, and takes the first replica
for the right one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp import platform
from grpo_mp.distributed.process_groups import all_gather, replica_groups
from grpo_mp.policy.fp8 import with_scales
from grpo_mp.policy.trained_model import TrainedModel
from grpo_mp.utils.errors import ReplicaDriftError
from grpo_mp.weight_sync.changes import CHUNK_WORDS, fingerprint, random_factors

NAMED = 3  # tensors in a sentence


def check_replicas(policy: TrainedModel, step: int) -> None:
    """Compare weights of a policy, and of its reference, or of a critic with those of replicas. Every rank must call.

    Raises ReplicaDriftError on every rank where any drifted. Weights that every update gathers anew from the
    optimizer's shards must be compared before it.
    """
    experts = {name for name, tensor in policy.tensors.items() if not getattr(tensor, "allreduce", True)}
    drifted, undecided = dict[int, list[str]](), False
    for group, names in zip(replica_groups(), (policy.tensors.keys() - experts, experts), strict=True):
        found = _drifted_in(group, _tensors(policy, names), drifted)
        undecided |= is_undecided(found, dist.get_world_size(group))
        drifted |= found
    outcomes = all_gather((drifted, undecided), policy.parallel.cpu_group)
    by_rank = {rank: names for found, _ in outcomes for rank, names in found.items()}
    if by_rank:
        faulty_ranks = () if any(undecided for _, undecided in outcomes) else sorted(by_rank)
        raise ReplicaDriftError(describe(step, by_rank), faulty_ranks)


def is_undecided(drifted: Mapping[int, Sequence[str]], replicas: int) -> bool:
    """Tell whether all of so many replicas differ from others, as two do: nothing says then who is right. Pure."""
    return len(drifted) == replicas


def find_drifted(checksums: Mapping[int, Sequence[int]], names: Sequence[str]) -> dict[int, list[str]]:
    """Return rank -> tensors whose checksum is not that of most replicas; without a majority, of all. Pure.

    `checksums`: of each replica's rank, in the order of `names`.
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
    """Return one sentence about ranks and their tensors that are not those of the replicas. Pure."""
    names = sorted(set().union(*drifted.values()))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    ranks = ", ".join(map(str, sorted(drifted)))
    return (
        f"step {step}: rank {ranks}: weights are not those of the other data-parallel replicas, in "
        f"{', '.join(names[:NAMED])}{more}: memory or network of the rank is faulty; leave its node out, and run the "
        "same command to resume from the last checkpoint"
    )


def _tensors(policy: TrainedModel, names: set[str]) -> dict[str, Tensor]:
    tensors = with_scales({name: policy.tensors[name] for name in sorted(names)})
    reference = policy.reference.host_tensors if policy.reference else {}
    return tensors | {f"{name} of the reference": reference[name] for name in tensors if name in reference}


def _drifted_in(
    group: dist.ProcessGroup, tensors: Mapping[str, Tensor], known: Mapping[int, list[str]]
) -> dict[int, list[str]]:
    """Return what drifted in a group, added to what is `known` of its ranks. Every rank of it must call this."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or not tensors:
        return {}
    factors = {device: random_factors(CHUNK_WORDS).to(device) for device in {one.device for one in tensors.values()}}
    own = [fingerprint(tensor, factors[tensor.device]) for tensor in tensors.values()]
    table = [torch.empty(len(own), dtype=torch.int64, device=platform.device()) for _ in ranks]
    dist.all_gather(table, torch.tensor(own, dtype=torch.uint64).view(torch.int64).to(platform.device()), group=group)
    found = find_drifted({rank: row.tolist() for rank, row in zip(ranks, table, strict=True)}, list(tensors))
    return {rank: [*known.get(rank, ()), *names] for rank, names in found.items()}
