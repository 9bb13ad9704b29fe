from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.conftest import TinyRun

Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def one_rank_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Make a job of this process alone, with a new folder for each run."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield SimpleNamespace(group=dist.group.WORLD, new_folder=lambda: tmp_path_factory.mktemp("run"))
    dist.destroy_process_group()


@pytest.fixture
def refuse(tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Start with settings laid over the tiny run's; returns the one sentence that comes of it."""
    from grpo_mp.train import main  # imports Megatron

    def start(*overrides: str, config: Path = tiny_run.config, ranks: int = 2) -> str:
        files = sorted(tmp_path.rglob("*"))
        arguments = [str(config), f"run.folder={tmp_path / 'run'}", *overrides, "--dry-run", "--ranks", str(ranks)]
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        out, err = capfd.readouterr()
        assert raised.value.code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == files
        return err.removeprefix("error: ").rstrip()

    return start
