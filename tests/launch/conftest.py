"""One cluster for all tests that submit jobs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import TinyRun
from tests.launch.batch_job import BatchJob
from tests.launch.cluster import Cluster, missing_requirement

Submit = Callable[..., BatchJob]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing_requirement():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def submit(cluster: Cluster, tiny_run: TinyRun, tmp_path: Path) -> Submit:
    """Submit launch/tiny_moe.sh with the smallest model, its run folder under tmp_path."""

    def submit_job(*settings: str, spares: int = 0, options: Sequence[str] = (), **environment: str) -> BatchJob:
        inputs = [
            f"run.folder={tmp_path / 'run'}",
            f"model.path={tiny_run.model}",
            f"data.train={tiny_run.train}",
            f"data.eval={{arithmetic: {tiny_run.folder / 'eval.jsonl'}}}",
            "rollout.prompts_per_step=4",
            "rollout.group_size=4",
            "rollout.max_response_tokens=16",
            "sync.check_tolerance=1.0e-4",
        ]
        return BatchJob(cluster, tmp_path, [*inputs, *settings], spares, options, **environment)

    return submit_job
