"""The scripts of launch/ on a real Slurm: three nodes, jobs of two with an engine on each."""

import socket
from pathlib import Path

import pytest

from tests.e2e.jobs import read_jsonl
from tests.launch.cluster import Cluster, wait_until
from tests.launch.conftest import BatchJob, Submit

pytestmark = pytest.mark.slow
WRAPPER = """
if [ "$SLURMD_NODENAME" = n2 ]; then export PYTHONPATH={folder}; fi
exec "$@"
"""


STEPS = 24  # of a third of a second each: none of the signals below may find the run at its end


@pytest.fixture
def after_a_lost_node(cluster: Cluster, submit: Submit) -> BatchJob:
    """Return a job that Slurm requeued when its second node was lost, in its second attempt."""
    job = submit(f"run.steps={STEPS}", "run.save_every=1", "run.export=false")
    job.wait_for(f"step 2/{STEPS}")
    with cluster.node_in_state("n2", "DOWN"):
        job.wait_requeued()
        job.wait_for("restarts so far: 1")
        assert job.nodes == "n[1,3]"
    job.wait_for_a_step_of_attempt(1)
    return job


@pytest.mark.nightly
def test_run_survives_a_lost_node_and_is_requeued_before_the_time_limit(
    cluster: Cluster, after_a_lost_node: BatchJob, tmp_path: Path
) -> None:
    job = after_a_lost_node
    job.signal()
    job.wait_for("resumes in a new attempt")
    wait_until(lambda: job.state == "PENDING", f"a requeue of\n{job.log}")
    steps_logged = [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert 3 < len(steps_logged) <= STEPS
    assert steps_logged == list(range(len(steps_logged)))
    cluster.run("scancel", job.id)
    job.wait_end()
    assert (job.state, job.remaining_processes()) == ("CANCELLED", []), job.log


@pytest.mark.nightly
def test_run_survives_a_lost_node_a_drained_node_and_the_time_limit(
    cluster: Cluster, after_a_lost_node: BatchJob, tmp_path: Path
) -> None:
    job = after_a_lost_node
    with cluster.node_in_state("n3", "DRAIN"):
        job.signal()
        job.wait_for("resumes in a new attempt")
        job.wait_requeued()
        job.wait_for("restarts so far: 2")
        assert job.nodes == "n[1-2]"
        job.wait_end()
    assert (job.state, job.remaining_processes()) == ("COMPLETED", []), job.log
    steps_logged = [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert steps_logged == list(range(STEPS + 1))
    attempts = [folder.name for folder in sorted((tmp_path / "run" / "attempts").iterdir())]
    assert attempts == [f"{job.id}.{restart}" for restart in range(3)]
    assert all((tmp_path / "run" / "logs" / f"engine_{number}.log").exists() for number in range(2))


@pytest.mark.nightly
def test_killed_rank_ends_the_job_and_is_named(submit: Submit) -> None:
    job = submit("run.steps=50", RESTARTS="0")
    job.wait_for("step 1/50")
    job.rank(1).kill()
    job.wait_end()
    assert job.state == "FAILED"
    assert "rank 1 failed: Killed on n2" in job.log
    assert job.remaining_processes() == []


@pytest.mark.nightly
def test_a_killed_rank_and_a_lost_node_end_no_job_with_a_spare(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    steps = 12
    job = submit(f"run.steps={steps}", "run.save_every=1", "run.export=false", spares=1)
    job.wait_for("step 1/")
    job.rank(1).kill()
    job.wait_for("rank 1 failed: Killed on n2")
    job.wait_for_a_step_of_attempt("0.1")
    with cluster.node_in_state("n2", "DOWN"):
        job.wait_for_a_step_of_attempt("0.2")
        assert "  n3: ranks 1-1; " in job.log
        job.wait_end()
    assert (job.state, job.remaining_processes()) == ("COMPLETED", []), job.log
    steps_logged = [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert steps_logged == list(range(steps + 1))


@pytest.mark.nightly
def test_a_job_that_another_pushes_aside_goes_on_after_it(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    """Slurm tells its ranks, and gives them time to save; the script that waits for them hears nothing."""
    steps = 24
    job = submit(f"run.steps={steps}", "run.save_every=100", "run.export=false")
    job.wait_for(f"step 2/{steps}")
    urgent = ("sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null")
    other = cluster.run(*urgent, "--wrap=sleep 1")
    job.wait_for("resumes in a new attempt")
    job.wait_requeued()
    wait_until(lambda: "COMPLETED" in cluster.run("scontrol", "show", "job", other), "the urgent job", 120.0)
    job.wait_end()
    assert (job.state, job.remaining_processes()) == ("COMPLETED", []), job.log
    assert "resumes after step" in job.log
    steps_logged = [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert steps_logged == list(range(steps + 1))


@pytest.mark.nightly
def test_cancelled_job_leaves_no_processes(cluster: Cluster, submit: Submit) -> None:
    job = submit("run.steps=50")
    job.wait_for("starting the engines")
    cluster.run("scancel", job.id)
    job.wait_end()
    assert (job.state, job.remaining_processes()) == ("CANCELLED", [])


@pytest.mark.nightly
def test_port_in_use_is_named(submit: Submit) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        job = submit("run.steps=1", MASTER_PORT=str(port), CHECK_WAIT_S="1")  # rank 1 would wait for rank 0
        job.wait_end()
    assert f"MASTER_PORT={port} of {socket.gethostname()} is taken" in job.log
    assert (job.exit_status, job.remaining_processes()) == (2, [])


def test_a_spare_takes_the_place_of_a_bad_node(submit: Submit, tmp_path: Path) -> None:
    """A site's hook puts a wrapper in front of ranks, which shows another torch on the second node."""
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    (tmp_path / "wrapper.sh").write_text(WRAPPER.format(folder=tmp_path))
    (tmp_path / "site.sh").write_text(f"inside=(bash {tmp_path / 'wrapper.sh'})\n")
    job = submit("run.steps=1", "run.export=false", spares=1, SITE=str(tmp_path / "site.sh"))
    job.wait_end()
    assert "bad node n2: it has torch 9.9" in job.log, job.log
    assert "  n3: ranks 1-1; " in job.log, job.log
    assert (job.state, job.remaining_processes()) == ("COMPLETED", []), job.log
