"""How a job's process groups come up."""

from typing import Any

import pytest
import torch.distributed as dist

from grpo_mp.config import Layout
from grpo_mp.distributed.process_groups import single_process_group, start_parallel, stop_parallel


def test_all_ranks_meet_in_the_whole_job_before_some_of_them_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL leaves it undefined when batched sends and receives between some ranks are a group's first call."""
    groups: list[Any] = []
    all_reduce = dist.all_reduce

    def listened(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        groups.append(group)
        return all_reduce(tensor, *args, group=group, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", listened)
    with single_process_group():
        start_parallel(Layout(), 0, 60.0)
        stop_parallel()
    assert groups == [None]
