"""The processes that write one folder together: one, or the ranks of a torchrun or srun job.

They share no process group, only the job's store: a rank that fails leaves nobody in a collective.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, rendezvous

from grpo_mp.errors import PhaseTimeout

LIMIT_S = 1800.0  # without a byte from anyone
POLL_S = 0.1


class WorkerGroup:
    """This process among them."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None, limit_s: float = LIMIT_S) -> None:
        """`store`: of more than one rank."""
        self.rank, self.size = rank, size
        self._store, self._limit_s, self._count = store, limit_s, 0

    @classmethod
    def of_job(cls) -> "WorkerGroup":
        """As the environment says; one process where no launcher started it."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls()
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=LIMIT_S)))
        return cls(rank, size, PrefixStore("convert", store))

    def agree(self, find: Callable[[], Any]) -> Any:
        """What `find` returns on the first rank, as JSON carries it."""
        if self._store is None:
            return find()
        if self.rank == 0:
            found = find()
            self._store.set("found", json.dumps(found))
            return found
        return json.loads(self._store.get("found"))

    def count(self, size: int) -> int:
        """Add bytes to those of all ranks; returns how many there are now."""
        self._count = self._store.add("bytes", size) if self._store else self._count + size
        return self._count

    def until(self, total: int) -> Iterator[int]:
        """Wait for the others; yields each new count. Raises PhaseTimeout where none comes for too long."""
        seen, since = self._count, time.monotonic()
        while seen < total:
            time.sleep(POLL_S)
            if (now := self.count(0)) > seen:
                seen, since = now, time.monotonic()
                yield now
            elif time.monotonic() - since > self._limit_s:
                raise PhaseTimeout(
                    f"the other ranks wrote nothing for {self._limit_s:.0f} s: start again, what is written stays"
                )

    def elects_itself(self) -> bool:
        """Whether this rank is the first to explain why the job ends."""
        try:
            return self._store is None or self._store.add("word", 1) == 1
        except DistError:
            return True  # the store is gone: a sentence too many is better than none
