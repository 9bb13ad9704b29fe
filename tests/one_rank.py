"""A job of one rank, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import Parallel, single_rank_environment, start_parallel, stop_parallel


@contextmanager
def one_rank_job() -> Iterator[Parallel]:
    """Make the process groups of a job of one rank while the body runs."""
    with single_rank_environment():
        parallel = start_parallel(LayoutConfig(), 0, 600.0)
        try:
            yield parallel
        finally:
            stop_parallel()
