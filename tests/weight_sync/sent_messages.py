"""What a rank gives to torch.distributed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def sent_messages() -> Iterator[list[int]]:
    """Yield the bytes of each message that this rank gives to torch.distributed, while the body runs."""
    exchange = dist.batch_isend_irecv
    sizes = list[int]()

    def record(operations: list[dist.P2POp]) -> list[dist.Work]:
        sizes.extend(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return exchange(operations)

    dist.batch_isend_irecv = record
    yield sizes
    dist.batch_isend_irecv = exchange
