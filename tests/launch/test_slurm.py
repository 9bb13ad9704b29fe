"""The scripts of launch/ on a real Slurm: three nodes, jobs of two with an engine on each."""

import socket
from pathlib import Path

import pytest

from tests.e2e.jobs import read_jsonl
from tests.launch.cluster import Cluster, wait_until
from tests.launch.conftest import Submit

pytestmark = pytest.mark.slow
WRAPPER = """
if [ "$SLURMD_NODENAME" = n2 ]; then export PYTHONPATH={folder}; fi
exec "$@"
"""


def test_run_survives_a_lost_node_a_drained_node_and_the_time_limit(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    steps = 40  # of a third of a second each: none of the signals below may find the run at its end
    job = submit(f"run.steps={steps}", "run.save_every=1")
    job.wait_for(f"step 2/{steps}")
    with cluster.node_in_state("n2", "DOWN"):
        job.wait_requeued()
        job.wait_for("restarts so far: 1")
        assert job.nodes == "n[1,3]"
    job.wait_for_a_step_of_attempt(1)
    with cluster.node_in_state("n3", "DRAIN"):
        job.signal()
        job.wait_for("resumes in a new attempt")
        job.wait_requeued()
        job.wait_for("restarts so far: 2")
        assert job.nodes == "n[1-2]"
        job.signal()  # while the nodes are checked
        job.wait_requeued()
        job.wait_for("restarts so far: 3")
        job.wait_end()
    assert (job.state, job.remaining_processes()) == ("COMPLETED", []), job.log
    steps_logged = [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert steps_logged == list(range(steps + 1))
    attempts = [folder.name for folder in sorted((tmp_path / "run" / "attempts").iterdir())]
    assert attempts == [f"{job.id}.{restart}" for restart in range(4)]
    assert all((tmp_path / "run" / "logs" / f"engine_{number}.log").exists() for number in range(2))


def test_killed_rank_ends_the_job_and_is_named(submit: Submit) -> None:
    job = submit("run.steps=50")
    job.wait_for("step 1/50")
    job.rank(1).kill()
    job.wait_end()
    assert job.state == "FAILED"
    assert "rank 1 failed: Killed on n2" in job.log
    assert job.remaining_processes() == []


def test_cancelled_job_leaves_no_processes(cluster: Cluster, submit: Submit) -> None:
    job = submit("run.steps=50")
    job.wait_for("starting the engines")
    cluster.run("scancel", job.id)
    job.wait_end()
    assert (job.state, job.remaining_processes()) == ("CANCELLED", [])


def test_port_in_use_is_named(submit: Submit) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        job = submit("run.steps=1", MASTER_PORT=str(port))
        job.wait_end()
    assert f"MASTER_PORT={port} of {socket.gethostname()} is taken" in job.log
    assert (job.exit_status, job.remaining_processes()) == (2, [])


def test_bad_node_is_named_and_excluded_from_a_new_job(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    """The site's hook puts a wrapper in front of ranks, which shows another torch on the second node."""
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    (tmp_path / "wrapper.sh").write_text(WRAPPER.format(folder=tmp_path))
    (tmp_path / "site.sh").write_text(f"inside=(bash {tmp_path / 'wrapper.sh'})\n")
    job = submit("run.steps=1", SITE=str(tmp_path / "site.sh"))
    job.wait_end()
    assert "bad node n2: it has torch 9.9" in job.log
    wait_until(lambda: cluster.run("squeue", "--noheader", "--states=RUNNING", "--format=%N") == "n[1,3]", "a new job")
    cluster.run("scancel", "--user=root")


def test_torchrun_on_each_node(submit: Submit, tmp_path: Path) -> None:
    job = submit("run.steps=1", "run.export=false", LAUNCHER="torchrun")
    job.wait_end()
    assert (job.state, job.remaining_processes()) == ("COMPLETED", []), job.log
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
