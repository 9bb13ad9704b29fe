"""The processes that write one folder together: one, or the ranks of a torchrun or srun job.

They share no process group, only the job's store, so a rank that fails leaves no other in a collective.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, rendezvous

from grpo_mp.errors import PhaseTimeout

TIMEOUT_S = 1800.0  # without a byte from any rank
POLL_S = 0.1


class WorkerGroup:
    """This process's view of the group."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        """Take this rank and the number of ranks; more than one need the job's `store`."""
        self.rank, self.size, self._store, self._bytes = rank, size, store, 0

    @classmethod
    def of_job(cls) -> "WorkerGroup":
        """Join the group that the launcher's environment names; one process where no launcher started it."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls()
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
        return cls(rank, size, PrefixStore("convert", store))

    def broadcast(self, compute: Callable[[], Any]) -> Any:
        """Return on every rank what `compute` returns on the first, which must fit into JSON. May be called once."""
        if self._store is None:
            return compute()
        if self.rank == 0:
            value = compute()
            self._store.set("broadcast", json.dumps(value))
            return value
        return json.loads(self._store.get("broadcast"))

    def add_bytes(self, size: int) -> int:
        """Add to the bytes written by all ranks; return their sum."""
        self._bytes = self._store.add("bytes", size) if self._store else self._bytes + size
        return self._bytes

    def wait_until(self, total: int) -> Iterator[int]:
        """Wait until all ranks have written `total` bytes; yield each new sum. Raises PhaseTimeout after a pause."""
        written, since = self._bytes, time.monotonic()
        while written < total:
            time.sleep(POLL_S)
            if (now := self.add_bytes(0)) > written:
                written, since = now, time.monotonic()
                yield now
            elif time.monotonic() - since > TIMEOUT_S:
                raise PhaseTimeout(
                    f"the other ranks wrote nothing for {TIMEOUT_S:.0f} s: start again, what is written stays"
                )

    def elects_itself(self) -> bool:
        """Tell whether this rank is the first to ask, and so the one that prints the error."""
        try:
            return self._store is None or self._store.add("reporters", 1) == 1
        except DistError:
            return True  # the store is gone: two reports are better than none
