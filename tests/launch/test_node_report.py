"""Which nodes are bad, from handwritten reports and from ranks that report one after another."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo_mp.cli import slurm_nodes
from grpo_mp.cli.slurm_job import BAD_NODES, CHECK_LOG, SAVED_STEP, name_lost_nodes
from grpo_mp.cli.slurm_nodes import BAD_NODES_STATUS, NodeReport, bad_nodes, check_nodes

GOOD = NodeReport("a", "torch 2")
REPORTS = [replace(GOOD, node=node) for node in "abcd" for _ in range(2)]


def test_equal_nodes_are_good() -> None:
    assert bad_nodes(REPORTS) == {}


@pytest.mark.parametrize("odd", [0, 5])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"versions": "torch 1"}, "it has torch 1, other nodes have torch 2: install the same"),
        ({"problem": "GPU 3 is gone"}, "GPU 3 is gone"),
    ],
)
def test_one_bad_rank_makes_its_node_bad(change: dict[str, object], reason: str, odd: int) -> None:
    """Also if it is the first node."""
    reports = [replace(one, **change) if rank == odd else one for rank, one in enumerate(REPORTS)]  # type: ignore[arg-type]
    found = bad_nodes(reports)
    assert list(found) == [reports[odd].node]
    assert found[reports[odd].node].startswith(reason)


def run_check(folders: dict[str, Path], silent: int | None = None) -> list[int]:
    """Check three nodes of two ranks, each with its folder; return the statuses of the ranks that are not `silent`."""
    store = dist.HashStore()
    nodes = [node for node in "abc" for _ in range(2)]
    ranks = [rank for rank in range(6) if rank != silent]
    # Rank 0, which waits for the others, is the last: none is late on a busy machine.
    return [check_nodes(folders[nodes[rank]], nodes, store, rank) for rank in reversed(ranks)][::-1]


def test_a_node_without_the_shared_folder_is_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / SAVED_STEP).touch()
    assert run_check(dict.fromkeys("abc", tmp_path)) == [0] * 6
    assert (tmp_path / BAD_NODES).read_text() == ""
    assert run_check({"a": tmp_path, "b": tmp_path, "c": tmp_path / "own"}) == [BAD_NODES_STATUS, *[0] * 5]
    assert (tmp_path / BAD_NODES).read_text() == "c"
    assert capsys.readouterr().out.startswith(f"bad node c: it does not see {tmp_path / 'own'}: ")


def test_a_node_that_does_not_answer_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of its ranks has crashed."""
    monkeypatch.setattr(slurm_nodes, "TIMEOUT_S", 0.5)
    (tmp_path / SAVED_STEP).touch()
    assert run_check(dict.fromkeys("abc", tmp_path), silent=3) == [BAD_NODES_STATUS, *[0] * 4]
    assert (tmp_path / BAD_NODES).read_text() == "b"
    assert capsys.readouterr().out == "bad node b: no answer in 0.5 s\n"


def test_a_node_that_takes_no_tasks_is_named_and_not_those_whose_tasks_srun_kills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its host is dead, and Slurm does not know yet; lines of a real srun 22.05, of a job of a thousand nodes."""
    nodes = ("n2", "n3")
    lines = [f"Task launch for StepId=1.0 failed on node {node}: Communication connection failure" for node in nodes]
    lines.append("Application launch failed: Communication connection failure")
    text = "".join(f"srun: error: {line}\n" for line in lines)
    text += "srun: Job step aborted: Waiting up to 12 seconds for job step to finish.\n"
    (tmp_path / CHECK_LOG).write_text(text + "".join(f"srun: error: n{n}: task {n}: Killed\n" for n in range(5, 1000)))
    name_lost_nodes(tmp_path)
    said = "srun could not start its tasks (Communication connection failure)"
    assert capsys.readouterr().out.splitlines() == [f"bad node {node}: {said}" for node in nodes]
    assert (tmp_path / BAD_NODES).read_text().split() == list(nodes)
