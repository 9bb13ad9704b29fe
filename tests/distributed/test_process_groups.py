"""Start of a job's process groups."""

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import make_groups, single_rank_environment, start_parallel, stop_parallel

ROOT = Path(__file__).parents[2]


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


def test_ranks_that_only_host_engines_share_groups_with_those_that_train(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    command += ["-m", "tests.distributed.join_job_on_ranks", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-3000:]
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        own = {"engines": [2, 3]} if rank > 1 else {"trainers": [0, 1], "tensor": rank}
        shared = {"rank": rank, "size": 4, "ranks": [0, 1, 2, 3], "sum": 6.0, "from": (rank - 1) % 4, "last": 3}
        assert found == shared | own


def test_an_engines_ranks_wait_for_each_other_as_long_as_a_phase_may_take(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group = make_groups([[0]], 1234.0)
        assert group
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == datetime.timedelta(seconds=1234)
    finally:
        dist.destroy_process_group()
