"""A rank that `grpo-mp doctor machine` starts: `python -m grpo_mp.doctor.exchange FOLDER RANK RANKS`.

Prints what the ranks of this machine exchange in bytes per second, as JSON.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.distributed.rates import all_reduce_rate, all_to_all_rate

LIMIT = timedelta(seconds=120)


def main() -> None:
    """Measure, and print."""
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if platform.on_cuda():
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(platform.backend(), store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    group = dist.group.WORLD
    assert group is not None  # just made
    rates = {"all_reduce": all_reduce_rate(group), "all_to_all": all_to_all_rate(group)}
    print(json.dumps(rates), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
