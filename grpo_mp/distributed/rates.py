"""Measure what ranks exchange per second, inside a node and between nodes."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.utils.errors import one_line

REPEATS = 5  # of a measured collective, of which the fastest counts
CUDA_BYTES, CPU_BYTES = 2**28, 2**22  # that it moves
TIMEOUT = timedelta(minutes=1)  # of a collective
# A group is a torch.distributed.ProcessGroup or the backend of one, which have the same collectives.


def measured_pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of measurements, in each of which a node is in one pair: first with itself."""
    rounds: list[list[tuple[int, int]]] = [[(node, node) for node in range(nodes)], [], [], []]
    for place, pair in enumerate(neighbor_pairs(nodes)):
        rounds[3 if place == nodes - 1 and nodes % 2 else 1 + place % 2].append(pair)
    return rounds


def neighbor_pairs(nodes: int) -> list[tuple[int, int]]:
    """Return each pair of neighbors in a ring of nodes once."""
    pairs = [(node, (node + 1) % nodes) for node in range(nodes)]
    return pairs[: max(0, nodes - 1)] if nodes < 3 else pairs


def result_within(ended: float, function: Callable[[], float]) -> float | str:
    """Return what a function returns, or what went wrong; one that hangs is left to its thread.

    `ended`: by the monotonic clock.
    """
    results: list[float | str] = []
    device = platform.device()

    def run() -> None:
        try:
            platform.use_device(device)
            results.append(function())
        except Exception as error:  # noqa: BLE001 - it is reported
            results.append(one_line(error, 200))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, ended - time.monotonic()))
    return results[0] if results else "no answer in time"


def group_rate(store: dist.Store, ranks: Sequence[int], rank: int, rate: Callable[[Any], float]) -> float:
    """Return a rate of some ranks, in a process group of their own; each of them must call this."""
    place, size = ranks.index(rank), len(ranks)
    if platform.on_cuda():
        with torch.cuda.stream(torch.cuda.Stream()):  # the default one may wait for a peer that hangs
            return rate(dist.ProcessGroupNCCL(store, place, size, dist.ProcessGroupNCCL.Options()))
    return rate(dist.ProcessGroupGloo(store, place, size, TIMEOUT))


def all_reduce_rate(group: Any) -> float:
    """Return bytes per second of an all-reduce; every rank of the group must call this."""
    data = _buffer()
    return _rate(data, lambda: group.allreduce([data]).wait())


def all_to_all_rate(group: Any) -> float:
    """Return bytes per second of an all-to-all; every rank of the group must call this."""
    data = _buffer()
    data = data[: data.numel() // group.size() * group.size()]
    out = torch.empty_like(data)
    return _rate(data, lambda: group.alltoall_base(out, data, [], []).wait())


def _buffer() -> torch.Tensor:
    size = CUDA_BYTES if platform.on_cuda() else CPU_BYTES
    return torch.zeros(size // 4, device=platform.device())


def _rate(data: torch.Tensor, collective: Callable[[], object]) -> float:
    collective()  # connections are made at first use
    _synchronize()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        collective()
        _synchronize()
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds)


def _synchronize() -> None:
    if platform.on_cuda():
        torch.cuda.current_stream().synchronize()
