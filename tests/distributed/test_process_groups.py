"""Start of a job's process groups."""

from typing import Any

import pytest
import torch.distributed as dist

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import single_rank_environment, start_parallel, stop_parallel


def test_first_collective_is_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL does not define batched sends and receives between some ranks as a group's first call."""
    groups: list[Any] = []
    all_reduce = dist.all_reduce

    def recording_all_reduce(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        groups.append(group)
        return all_reduce(tensor, *args, group=group, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", recording_all_reduce)
    with single_rank_environment():
        start_parallel(LayoutConfig(), 0, 60.0)
        default = dist.group.WORLD
        stop_parallel()
    assert groups == [default]
