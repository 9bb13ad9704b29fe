"""Groups of the ranks of engines and nodes."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from grpo_mp.distributed.process_groups import make_groups


@pytest.fixture
def single_rank_job(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_rank_job")
def test_an_engines_ranks_wait_for_each_other_as_long_as_a_phase_may_take() -> None:
    group = make_groups([[0]], 1234.0)
    assert group
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == datetime.timedelta(seconds=1234)
