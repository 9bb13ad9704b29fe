from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_rank_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Make a job of this process alone, with a new folder for each run."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield SimpleNamespace(group=dist.group.WORLD, new_folder=lambda: tmp_path_factory.mktemp("run"))
    dist.destroy_process_group()
