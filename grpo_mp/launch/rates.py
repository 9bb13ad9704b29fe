"""How fast ranks move bytes: inside a node, and between nodes two at a time, so that a slow one stands out."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from grpo_mp import platform

REPEATS = 3
CUDA_BYTES, CPU_BYTES = 2**28, 2**22


def measure(nodes: Sequence[int], rank: int) -> dict[str, float | None]:
    """Bytes per second, None where there is nobody to talk to; `nodes`: the node number of each rank.

    Every rank must call this. All-to-all is measured with both neighbours of a node, and the better counts: a node is
    slow where it is slow with everybody.
    """
    members: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        members.setdefault(node, []).append(place)
    between = [[*members[one], *members[other]] for one, other in ring(len(members))]
    return {
        "all_reduce": _best(list(members.values()), _all_reduce, rank),
        "all_to_all": _best(between, _all_to_all, rank),
    }


def ring(nodes: int) -> list[tuple[int, int]]:
    """Each pair of neighbours once."""
    pairs = [(node, (node + 1) % nodes) for node in range(nodes)]
    return pairs[: max(0, nodes - 1)] if nodes < 3 else pairs


def _best(groups: list[list[int]], collective: Callable[[dist.ProcessGroup], float], rank: int) -> float | None:
    made = [(group, dist.new_group(group)) for group in groups if len(group) > 1]
    return max((collective(group) for ranks, group in made if rank in ranks), default=None)


def _all_reduce(group: dist.ProcessGroup) -> float:
    data = _data()
    return _rate(data, lambda: dist.all_reduce(data, group=group))


def _all_to_all(group: dist.ProcessGroup) -> float:
    size = dist.get_world_size(group)
    data = _data()
    data = data[: data.numel() // size * size]
    out = torch.empty_like(data)
    return _rate(data, lambda: dist.all_to_all_single(out, data, group=group))


def _data() -> torch.Tensor:
    size = CUDA_BYTES if platform.on_cuda() else CPU_BYTES
    return torch.zeros(size // 4, device=platform.device())


def _rate(data: torch.Tensor, act: Callable[[], object]) -> float:
    act()  # connections are made at first use
    platform.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        act()
    platform.synchronize()
    return REPEATS * data.nbytes / (time.perf_counter() - start)
