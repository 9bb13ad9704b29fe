"""A rank of a job that hangs: `python -m tests.doctor.hanging_rank FOLDER RANK`."""

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mp.distributed.rendezvous import RECORDED_COLLECTIVES, RECORDER_VARIABLE
from grpo_mp.monitor.rank_dump import RankDumper

WORLD_SIZE = 3
LIMIT_S = 120.0


def sleeps_before_the_collective() -> None:
    time.sleep(LIMIT_S)


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(sys.argv[2])
    os.environ[RECORDER_VARIABLE] = str(RECORDED_COLLECTIVES)
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    timeout = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    left = dist.new_group([0, 1], group_desc="left")
    right = dist.new_group([1, 2], group_desc="right")
    values = torch.ones(4)
    for group, ranks in ((left, (0, 1)), (right, (1, 2))):
        if rank in ranks:
            dist.all_reduce(values, group=group)
    with RankDumper(rank, folder, lambda: "TRAIN for 9 s"):
        threading.Timer(1.0, print, ("hangs",), {"flush": True}).start()
        if rank == 2:
            sleeps_before_the_collective()
        dist.all_reduce(values, group=right if rank else left)


if __name__ == "__main__":
    main()
