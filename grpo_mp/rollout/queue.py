"""Dynamic load balancing: engine hosts pull group numbers from one counter in the job's store."""

import torch.distributed as dist


class WorkQueue:
    """Numbers 0 .. size-1, each given to exactly one caller in the whole job."""

    def __init__(self, store: dist.Store, name: str, size: int) -> None:
        """`name` must be new in the job: a counter is never reset."""
        self._store, self._key, self._size = store, f"queue/{name}", size

    def next(self) -> int | None:
        """Take the next number, or None when all are taken."""
        number = self._store.add(self._key, 1) - 1
        return number if number < self._size else None

    def mark_finished(self) -> int:
        """Count one group as finished; return its place in the order of finishing."""
        return int(self._store.add(f"{self._key}/finished", 1))

    def finished_count(self) -> int:
        """Count the groups that are finished in the whole job."""
        return int(self._store.add(f"{self._key}/finished", 0))
