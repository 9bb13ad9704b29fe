"""Compare the weights of data-parallel replicas by checksums.

Megatron's check_param_hashes_across_dp_replicas copies all weights to the host, needs CUDA, and assumes that the first
replica is right.
"""

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
    factors = {device: random_factors(CHUNK_WORDS).to(device) for device in {one.device for one in tensors.values()}}
    own = [fingerprint(tensor, factors[tensor.device]) for tensor in tensors.values()]
    table = [torch.empty(len(own), dtype=torch.int64, device=platform.device()) for _ in range(group.size())]
    dist.all_gather(table, torch.tensor(own, dtype=torch.uint64).view(torch.int64).to(platform.device()), group=group)
    return torch.stack(table).cpu()
