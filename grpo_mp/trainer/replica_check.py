"""Compare the weights of data-parallel replicas by checksums.

Megatron's check_param_hashes_across_dp_replicas copies all weights to the host, needs CUDA, and assumes that the first
replica is right.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp import platform
from grpo_mp.distributed.process_groups import all_gather, replica_groups
from grpo_mp.policy.trained_model import TrainedModel
from grpo_mp.utils.errors import EarlyStopError

NAMED = 3  # tensors named in a message
CHECK_EVERY = 20  # steps
CHUNK = 2**20  # elements that are summed at a time
ODD = 0x9E3779B97F4A7C15 - 2**64  # as int64
BITS = {2: torch.int16, 4: torch.int32}  # integer dtype by the size of an element


def check_replicas(model: TrainedModel, step: int, every: int = CHECK_EVERY) -> None:
    """Compare the weights of a policy or critic, and its reference, between replicas if `every` divides `step`.

    Raise EarlyStopError on all ranks if they differ. Call this before an update, which gathers the weights from the
    optimizer's shards and so hides a drift.
    """
    if step % every:
        return
    experts = {name for name, tensor in model.tensors.items() if not getattr(tensor, "allreduce", True)}
    own = set[tuple[int, str]]()
    for group, names in zip(replica_groups(), (model.tensors.keys() - experts, experts), strict=True):
        tensors = _tensors(model, names)
        ranks = dist.get_process_group_ranks(group)
        if tensors and len(ranks) > 1:
            checksums = _checksums(group, tensors)
            differs = checksums != (checksums.mode(dim=0).values if len(ranks) > 2 else checksums.flip(0))
            own |= {(ranks[place], [*tensors][column]) for place, column in differs.nonzero().tolist()}
    if drifted := set[tuple[int, str]]().union(*all_gather(own, model.parallel.cpu_group)):
        ranks_text = ", ".join(map(str, sorted({rank for rank, _ in drifted})))
        found = sorted({name for _, name in drifted})
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        raise EarlyStopError(
            f"step {step}: rank {ranks_text}: weights are not those of the other data-parallel replicas, in "
            f"{', '.join(found[:NAMED])}{more}: memory or network of the rank is faulty; leave its node out, and run "
            "the same command to resume from the last checkpoint"
        )


def _tensors(model: TrainedModel, names: set[str]) -> dict[str, Tensor]:
    tensors = {name: model.tensors[name] for name in sorted(names)}
    reference = model.reference.host_tensors if model.reference else {}
    return tensors | {f"{name} of the reference": reference[name] for name in tensors if name in reference}


def _checksums(group: dist.ProcessGroup, tensors: dict[str, Tensor]) -> Tensor:
    """Return the checksums of the tensors (columns) on each rank of the group (rows)."""
    own = torch.stack([checksum(tensor).to(platform.device()) for tensor in tensors.values()])
    table = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(table, own, group=group)
    return torch.stack(table).cpu()


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of a tensor: the sum of its elements' bits, each multiplied by a random odd factor."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(BITS[flat.element_size()])
    factors = _random_factors(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in bits.split(len(factors)):
        total = total * ODD + (chunk.long() * factors[: len(chunk)]).sum()  # depends on the order of the chunks
    return total


@cache
def _random_factors(device: torch.device) -> Tensor:
    """Return odd numbers, int64 [CHUNK], equal on every rank."""
    low = torch.iinfo(torch.int64).min
    high = torch.iinfo(torch.int64).max
    return (torch.randint(low, high, (CHUNK,), generator=torch.Generator().manual_seed(0)) | 1).to(device)
