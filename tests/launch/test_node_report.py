"""Which nodes are bad, from handwritten reports."""

from dataclasses import replace

import pytest

from grpo_mp.distributed.rates import neighbor_pairs
from grpo_mp.launch.nodes import NodeReport, bad_nodes

GOOD = NodeReport("a", "torch 2", 0.0, 100 * 2**30, 90 * 2**30, None, all_reduce=100e9, all_to_all=20e9)
REPORTS = [replace(GOOD, node=node) for node in "abcd" for _ in range(2)]


def test_equal_nodes_are_good() -> None:
    assert bad_nodes(REPORTS) == {}


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
    reports = [*REPORTS[:5], replace(REPORTS[5], **change), *REPORTS[6:]]  # type: ignore[arg-type]
    assert list(bad_nodes(reports)) == ["c"]
    assert bad_nodes(reports)["c"].startswith(reason)


@pytest.mark.parametrize(("rate", "bad"), [(5e9, []), (1.5e9, ["c"])])
def test_rates_of_cpus_may_differ_more(rate: float, bad: list[str]) -> None:
    reports = [replace(report, gpus=False) for report in REPORTS]
    reports[5] = replace(reports[5], all_to_all=rate)
    assert list(bad_nodes(reports)) == bad


def test_node_without_the_shared_folder_is_bad() -> None:
    assert list(bad_nodes(REPORTS, ["d"])) == ["d"]


@pytest.mark.parametrize(("nodes", "pairs"), [(1, 0), (2, 1), (3, 3), (16, 16)])
def test_three_or_more_nodes_have_two_neighbors_each(nodes: int, pairs: int) -> None:
    assert len(set(neighbor_pairs(nodes))) == pairs
    if nodes > 2:
        assert all(sum(node in pair for pair in neighbor_pairs(nodes)) == 2 for node in range(nodes))
