"""Seconds of the check of replicas beside an update: `torchrun --nproc-per-node 2 -m tests.bench.replica_check`.

Two ranks hold the policy of small_policy.py, 46 million float32 parameters, with its reference; an update
has TOKENS tokens on each. Every rank has one core.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mp.distributed.process_groups import start_parallel, stop_parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.replica_check import check_replicas
from tests.algorithms.objective import loss_of
from tests.bench.small_policy import SHAPE, TOKENS, padding, settings_of
from tools.tiny.models import make_tiny, make_tokenizer

REPEATS = 3


def main() -> None:
    """Print the medians and their ratio."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder, "qwen3", make_tokenizer([]), **SHAPE)
        settings = settings_of(folder)
        parallel = start_parallel(settings.layout, 0, 60.0)
        policy, loss = Policy(settings, parallel, with_reference=True), loss_of(settings.algorithm)
        check_s = seconds(lambda: check_replicas(policy, 1))
        update_s = seconds(lambda: policy.update([padding(TOKENS)], loss))
        if parallel.rank == 0:
            every = settings.monitor.check_replicas_every
            print(f"check {check_s:.3f} s, update {update_s:.3f} s, ratio {check_s / update_s:.3f}; ", end="")
            print(f"at check_replicas_every={every} {check_s / update_s / every:.2%} of the updates")
        stop_parallel()


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of some work that all ranks do, after it ran once."""
    times = []
    for _ in range(1 + REPEATS):
        dist.barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]


if __name__ == "__main__":
    main()
