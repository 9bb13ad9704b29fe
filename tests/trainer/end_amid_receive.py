"""Rank 0 fails while a thread waits for rank 1, which ends while Python of rank 0 does. Run under torchrun."""

import atexit
import os
import time
from collections.abc import Callable

import torch.distributed as dist

from grpo_mp.distributed.peers import watching_peers
from grpo_mp.trainer.exit import end_without_cleanup, exit_on_error
from grpo_mp.utils.errors import UserError


class SlowToDelete:
    """Lets Python's end take a second."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1)


slow = SlowToDelete()
with end_without_cleanup(), exit_on_error():
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    with watching_peers(dist.group.WORLD):
        if dist.get_rank() == 1:
            store.get("rank 0 ends")
            time.sleep(0.3)
            os._exit(2)
        atexit.register(store.set, "rank 0 ends", "")
        raise UserError("the mistake")
