"""Which nodes are bad, from handwritten reports."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from grpo_mp.cli import slurm_nodes as nodes_module
from grpo_mp.cli.slurm_job import BAD_NODES, CHECK_LOG, name_crashed_node
from grpo_mp.cli.slurm_nodes import NodeReport, bad_nodes

GOOD = NodeReport("a", "torch 2", 0.0, 100 * 2**30, 90 * 2**30, None)
REPORTS = [replace(GOOD, node=node) for node in "abcd" for _ in range(2)]


def test_equal_nodes_are_good() -> None:
    assert bad_nodes(REPORTS) == {}
    assert bad_nodes([replace(report, host_free_bytes=30 * 2**30) for report in REPORTS]) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"versions": "torch 1"}, "it has torch 1, a has torch 2"),
        ({"clock_offset_s": -7.0}, "its clock is -7.0 s off those of other nodes"),
        ({"host_free_bytes": 40 * 2**30}, "only 40 of 100 GiB host memory are free"),
        ({"problem": "GPU 3 is gone"}, "GPU 3 is gone"),
    ],
)
def test_one_bad_rank_makes_its_node_bad(change: dict[str, object], reason: str) -> None:
    reports = [*REPORTS[:5], replace(REPORTS[5], **change), *REPORTS[6:]]  # type: ignore[arg-type]
    assert list(bad_nodes(reports)) == ["c"]
    assert bad_nodes(reports)["c"].startswith(reason)


def reports_of(nodes: int, odd: int, change: dict[str, Any]) -> list[NodeReport]:
    """Return the reports of nodes of two ranks, of which one is odd: n0, n1, ..."""
    names = [f"n{number}" for number in range(nodes)]
    odd_ones = [change if number == odd else {} for number in range(nodes)]
    return [replace(GOOD, node=name, **odd) for name, odd in zip(names, odd_ones, strict=True) for _ in range(2)]


@pytest.mark.parametrize("nodes", [3, 4, 16])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"versions": "torch 1"}, "it has torch 1, n{other} has torch 2: install the same"),
        ({"clock_offset_s": 7.0}, "its clock is +7.0 s off those of other nodes"),
    ],
)
def test_the_odd_node_is_bad_be_it_the_first(nodes: int, change: dict[str, object], reason: str) -> None:
    for odd in (0, 1, nodes - 1):
        reports = reports_of(nodes, odd, change)
        assert bad_nodes(reports) == {f"n{odd}": reason.format(other=0 if odd else 1)}


def test_a_wrong_clock_of_the_first_node_is_its_own() -> None:
    """The others measure theirs against it."""
    reports = [replace(report, clock_offset_s=0.0 if report.node == "a" else -30.0) for report in REPORTS]
    assert bad_nodes(reports) == {"a": "its clock is +30.0 s off those of other nodes"}


def test_of_two_nodes_that_differ_nothing_says_which_is_right() -> None:
    assert bad_nodes(reports_of(2, 0, {"versions": "torch 1"})) == {
        "n0": "it has torch 1, n1 has torch 2: install the same",
        "n1": "it has torch 2, n0 has torch 1: install the same",
    }
    assert bad_nodes(reports_of(2, 1, {"clock_offset_s": 7.0})) == {
        "n0": "its clock is -7.0 s off those of other nodes",
        "n1": "its clock is +7.0 s off those of other nodes",
    }


def seen_from(mounts: str, problems: str = "") -> list[NodeReport]:
    """Return reports of nodes 0, 1, ..., each with the file system that is mounted there; of one that has a problem."""
    nodes = [str(number) for number in range(len(mounts))]
    return [
        replace(
            GOOD,
            node=node,
            seen=[other for other, its in zip(nodes, mounts, strict=True) if its == mount and other not in problems],
            problem="no folder" if node in problems else None,
        )
        for node, mount in zip(nodes, mounts, strict=True)
    ]


@pytest.mark.parametrize(
    ("mounts", "bad"),
    [("xx", []), ("xy", ["0", "1"]), ("yxx", ["0"]), ("xxy", ["2"]), ("y" + 15 * "x", ["0"]), ("xyz", ["0", "1", "2"])],
)
def test_node_without_the_shared_folder_is_bad_be_it_the_first(mounts: str, bad: list[str]) -> None:
    found = bad_nodes(seen_from(mounts))
    assert list(found) == bad
    assert all("into the run's folder is not seen by" in reason for reason in found.values())


def test_a_node_that_cannot_write_makes_no_other_bad() -> None:
    assert bad_nodes(seen_from("xy", problems="0")) == {"0": "no folder"}


def test_nodes_are_named_from_what_their_files_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks of three nodes, two each, as threads; the first node has another folder mounted."""
    store, names, folders = dist.HashStore(), list("abc"), {"a": tmp_path / "own", "b": tmp_path, "c": tmp_path}
    (tmp_path / "own").mkdir()
    checks = [
        nodes_module.NodeCheck(folders[names[rank // 2]], names, store, rank, world_size=6, ranks_per_node=2)
        for rank in range(6)
    ]
    with ThreadPoolExecutor(len(checks)) as threads:
        statuses = list(threads.map(lambda check: check.run(), checks))
    assert statuses == [nodes_module.BAD_NODES_STATUS] * 6
    assert (tmp_path / "own" / BAD_NODES).read_text() == "a"
    said = "what it writes into the run's folder is not seen by b: share the folder"
    assert capsys.readouterr().out == f"bad node a: {said}\n"


@pytest.mark.parametrize(
    ("how", "bad"), [("Killed", True), ("Segmentation fault", True), ("Exited with exit code 1", True), ("", False)]
)
def test_the_node_whose_check_crashed_first_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, bad: bool
) -> None:
    """By what srun says; a mistake of the user's is no node's fault."""
    (tmp_path / "check_3.log").write_text("ImportError: libcuda.so.1\n")
    lines = [f"srun: error: n2: task 3: {how or 'Exited with exit code 2'}", "srun: error: n1: tasks 0-1: Terminated"]
    (tmp_path / CHECK_LOG).write_text("\n".join(lines))
    name_crashed_node(tmp_path)
    said = f"bad node n2: its check crashed ({how}): ImportError: libcuda.so.1\n" if bad else ""
    assert capsys.readouterr().out == said
    assert (tmp_path / BAD_NODES).exists() == bad


@pytest.mark.parametrize(
    ("first", "bad"), [("n1: tasks 0-1: Terminated", True), ("n1: task 0: Exited with exit code 2", False)]
)
def test_who_srun_ended_and_who_came_after_a_mistake_is_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: str, bad: bool
) -> None:
    (tmp_path / CHECK_LOG).write_text(f"srun: error: {first}\nsrun: error: n2: task 3: Killed\n")
    name_crashed_node(tmp_path)
    assert capsys.readouterr().out == ("bad node n2: its check crashed (Killed)\n" if bad else "")
    assert (tmp_path / BAD_NODES).exists() == bad


@pytest.mark.parametrize("nodes", [("n2",), ("n2", "n3")])
def test_a_node_that_takes_no_tasks_is_named_and_not_those_whose_tasks_srun_kills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: tuple[str, ...]
) -> None:
    """Its host is dead, and Slurm does not know yet; lines of a real srun 22.05, of a job of a thousand nodes."""
    lines = [f"Task launch for StepId=1.0 failed on node {node}: Communication connection failure" for node in nodes]
    lines.append("Application launch failed: Communication connection failure")
    text = "".join(f"srun: error: {line}\n" for line in lines)
    text += "srun: Job step aborted: Waiting up to 12 seconds for job step to finish.\n"
    (tmp_path / CHECK_LOG).write_text(text + "".join(f"srun: error: n{n}: task {n}: Killed\n" for n in range(5, 1000)))
    name_crashed_node(tmp_path)
    said = "srun could not start its tasks (Communication connection failure)"
    assert capsys.readouterr().out.splitlines() == [f"bad node {node}: {said}" for node in nodes]
    assert (tmp_path / BAD_NODES).read_text().split() == list(nodes)


def test_a_check_that_srun_was_told_to_end_blames_no_node(tmp_path: Path) -> None:
    text = "srun: Job step aborted: Waiting up to 12 seconds for job step to finish.\nsrun: error: n3: task 2: Killed\n"
    (tmp_path / CHECK_LOG).write_text(text)
    name_crashed_node(tmp_path)
    assert not (tmp_path / BAD_NODES).exists()
