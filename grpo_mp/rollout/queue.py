"""Shared work: engine hosts pull group numbers from one counter in the job's store, so fast engines take more."""

import torch.distributed as dist


class WorkQueue:
    """Numbers 0 .. size-1, each given to exactly one caller in the whole job."""

    def __init__(self, store: dist.Store, name: str, size: int) -> None:
        """`name` must be new in the job: a counter is never reset."""
        self._store, self._key, self._size = store, f"queue/{name}", size

    def next(self) -> int | None:
        """The next number, or None when all are taken."""
        number = self._store.add(self._key, 1) - 1
        return number if number < self._size else None

    def finish(self) -> int:
        """Count one as done; its place in the order of all that are."""
        return int(self._store.add(f"{self._key}/finished", 1))

    def finished(self) -> int:
        """How many are done in the whole job."""
        return int(self._store.add(f"{self._key}/finished", 0))
