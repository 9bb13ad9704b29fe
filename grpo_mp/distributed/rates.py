"""Measure what ranks exchange per second, inside a node and between nodes."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from grpo_mp import platform

REPEATS = 5  # of a measured collective, of which the fastest counts
CUDA_BYTES, CPU_BYTES = 2**28, 2**22  # that it moves


def measure_rates(node_of_rank: Sequence[int], rank: int) -> tuple[float | None, float | None]:
    """Return bytes per second of all-reduce and of all-to-all, None where a rank has no peer.

    Every rank must call this. All-to-all is measured with both neighbors of a node, and the better counts: a node is
    slow where it is slow with everybody.
    """
    ranks_of_node: dict[int, list[int]] = {}
    for peer, node in enumerate(node_of_rank):
        ranks_of_node.setdefault(node, []).append(peer)
    pairs = [[*ranks_of_node[left], *ranks_of_node[right]] for left, right in neighbor_pairs(len(ranks_of_node))]
    all_reduce = _best_rate(list(ranks_of_node.values()), all_reduce_rate, rank)
    return all_reduce, _best_rate(pairs, all_to_all_rate, rank)


def neighbor_pairs(nodes: int) -> list[tuple[int, int]]:
    """Return each pair of neighbors in a ring of nodes once."""
    pairs = [(node, (node + 1) % nodes) for node in range(nodes)]
    return pairs[: max(0, nodes - 1)] if nodes < 3 else pairs


def _best_rate(groups: list[list[int]], measure: Callable[[dist.ProcessGroup], float], rank: int) -> float | None:
    process_groups = [(ranks, dist.new_group(ranks)) for ranks in groups if len(ranks) > 1]
    return max((measure(group) for ranks, group in process_groups if rank in ranks), default=None)


def all_reduce_rate(group: dist.ProcessGroup) -> float:
    """Return bytes per second of an all-reduce; every rank of the group must call this."""
    data = _buffer()
    return _rate(data, lambda: dist.all_reduce(data, group=group))


def all_to_all_rate(group: dist.ProcessGroup) -> float:
    """Return bytes per second of an all-to-all; every rank of the group must call this."""
    size = dist.get_world_size(group)
    data = _buffer()
    data = data[: data.numel() // size * size]
    out = torch.empty_like(data)
    return _rate(data, lambda: dist.all_to_all_single(out, data, group=group))


def _buffer() -> torch.Tensor:
    size = CUDA_BYTES if platform.on_cuda() else CPU_BYTES
    return torch.zeros(size // 4, device=platform.device())


def _rate(data: torch.Tensor, collective: Callable[[], object]) -> float:
    collective()  # connections are made at first use
    platform.synchronize()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        collective()
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds)
