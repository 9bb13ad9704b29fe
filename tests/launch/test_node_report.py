"""Which nodes are bad, from reports written by hand."""

from dataclasses import replace

import pytest

from grpo_mp.launch.node_report import NodeReport, bad_nodes
from grpo_mp.launch.rates import ring

GOOD = NodeReport("a", "torch 2", 0.0, 100 * 2**30, 90 * 2**30, None, all_reduce=100e9, all_to_all=20e9)
NODES = [replace(GOOD, node=node) for node in "abcd" for _ in range(2)]


def test_equal_nodes_are_fit() -> None:
    assert bad_nodes(NODES) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"versions": "torch 1"}, "it has torch 1, a has torch 2"),
        ({"clock_offset_s": -7.0}, "its clock is -7.0 s off that of a"),
        ({"host_free_bytes": 40 * 2**30}, "only 40 of 100 GiB host memory are free"),
        ({"problem": "GPU 3 is gone"}, "GPU 3 is gone"),
        ({"all_reduce": 40e9}, "all-reduce inside the node at 40.00 GB/s, the median is 100.00"),
        ({"all_to_all": 9e9}, "all-to-all with other nodes at 9.00 GB/s, the median is 20.00"),
    ],
)
def test_one_bad_rank_makes_its_node_bad(change: dict[str, object], reason: str) -> None:
    reports = [*NODES[:5], replace(NODES[5], **change), *NODES[6:]]  # type: ignore[arg-type]
    assert list(bad_nodes(reports)) == ["c"]
    assert bad_nodes(reports)["c"].startswith(reason)


def test_a_node_that_does_not_share_the_folder_is_bad() -> None:
    assert list(bad_nodes(NODES, ["d"])) == ["d"]


@pytest.mark.parametrize(("nodes", "pairs"), [(1, 0), (2, 1), (3, 3), (16, 16)])
def test_every_node_has_two_neighbours_where_there_are_three(nodes: int, pairs: int) -> None:
    assert len(set(ring(nodes))) == pairs
    if nodes > 2:
        assert all(sum(node in pair for pair in ring(nodes)) == 2 for node in range(nodes))
