"""Check that every node is fit to train: `srun ... python -m grpo_mp.cli.slurm_nodes ATTEMPT NODES`, one task per rank.

NODES are the names of the allocation's nodes, separated by commas. Each rank reports on its node; rank 0
compares the reports, prints the bad nodes, and writes their names to ATTEMPT/bad_nodes. Exits with 3 where one is bad.
"""

import datetime
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch.distributed as dist

from grpo_mp.cli.slurm_job import BAD_NODES
from grpo_mp.cli.slurm_task import rank_environment
from grpo_mp.distributed.rendezvous import rendezvous
from grpo_mp.utils.errors import UserError, exit_with, one_line
from grpo_mp.utils.parsers import Parser

BAD_NODES_STATUS = 3
TIMEOUT_S = 60.0
TIMEOUT = datetime.timedelta(seconds=TIMEOUT_S)
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "transformer-engine")
MAX_CLOCK_OFFSET_S = 5.0  # logs and traces of nodes are read side by side
MIN_FREE_SHARE = 0.5  # of the median share of free host memory
SHARED_MEMORY, LOCAL_BYTES = "/dev/shm", 2**20  # each rank writes as much to see that there is room


def main() -> None:
    """Run the command line."""
    parser = Parser("python -m grpo_mp.cli.slurm_nodes", str(__doc__))
    parser.add_argument("attempt", type=Path)
    parser.add_argument("nodes")
    try:
        args = parser.parse_args()
        os.environ.update(rank_environment(os.environ))
        nodes, ranks_per_node = args.nodes.split(","), int(os.environ["LOCAL_WORLD_SIZE"])
        store, rank, world_size = rendezvous(TIMEOUT)
        status = NodeCheck(
            args.attempt, nodes, store=store, rank=rank, world_size=world_size, ranks_per_node=ranks_per_node
        ).run()
    except UserError as error:
        exit_with(error)
    sys.stdout.flush()
    os._exit(status)  # without waiting for groups whose other ends may be the very ones that hang


@dataclass(frozen=True)
class NodeReport:
    """One rank's report."""

    node: str
    versions: str
    clock_offset_s: float  # to rank 0, whose clock may be the wrong one
    host_total_bytes: int
    host_free_bytes: int
    problem: str | None  # what makes the node unfit by itself
    seen: Sequence[str] | None = None  # nodes whose file in the run's folder this node sees; None: it did not look


@dataclass(frozen=True)
class NodeCheck:
    """The check as one rank runs it."""

    attempt: Path
    nodes: Sequence[str]  # names
    store: dist.Store
    rank: int
    world_size: int
    ranks_per_node: int

    def run(self) -> int:
        """Report to rank 0, which compares the nodes; return the exit status."""
        if self.rank == 0:
            self.store.set("clock", str(time.time()))
        self._wait("clock")
        offset = time.time() - float(self.store.get("clock"))
        report = inspect_node(self._node_of(self.rank), self.attempt, offset)
        self.store.set(f"inspected/{self.rank}", json.dumps(asdict(report)))
        ranks: Sequence[int] = range(self.world_size)
        if self.rank == 0:
            ranks = self._answered("inspected", ranks)
            self.store.set("inspected", "")
        self._wait("inspected")  # by all that answer: then their files are there
        if self.rank % self.ranks_per_node == 0:
            report = replace(report, seen=seen_nodes(self.nodes, self.attempt))
        self.store.set(f"seen/{self.rank}", json.dumps(asdict(report)))
        if self.rank == 0:
            self.store.set("fit", str(self._check_reports(self._reports("seen", ranks))))
        self._wait("fit")
        return int(self.store.get("fit"))

    def _check_reports(self, reports: list[NodeReport]) -> int:
        silent = {self._node_of(rank) for rank in range(self.world_size)} - {report.node for report in reports}
        bad = dict.fromkeys(silent, f"no answer in {TIMEOUT_S:g} s")
        bad |= bad_nodes(reports)
        for node, reason in bad.items():
            print(f"bad node {node}: {reason}")
        (self.attempt / BAD_NODES).write_text("\n".join(bad))
        return BAD_NODES_STATUS if bad else 0

    def _answered(self, stage: str, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of `ranks` that answer in time."""
        keys = [f"{stage}/{rank}" for rank in ranks]
        deadline = time.monotonic() + TIMEOUT_S
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [rank for rank, key in zip(ranks, keys, strict=True) if self.store.check([key])]

    def _reports(self, stage: str, ranks: Sequence[int]) -> list[NodeReport]:
        """Return the reports of those of `ranks` that answer in time."""
        answered = [f"{stage}/{rank}" for rank in self._answered(stage, ranks)]
        return [NodeReport(**json.loads(text)) for text in self.store.multi_get(answered)]

    def _wait(self, key: str) -> None:
        try:
            self.store.wait([key], TIMEOUT * 2)
        except dist.DistError as error:
            raise UserError(f"node check: rank {self.rank} got no answer from rank 0 in {2 * TIMEOUT_S:g} s") from error

    def _node_of(self, rank: int) -> str:
        return self.nodes[rank // self.ranks_per_node]


def inspect_node(node: str, attempt: Path, clock_offset_s: float) -> NodeReport:
    """Report on this node; leave a file in the shared folder, so that the other nodes see that it reaches it."""
    memory = psutil.virtual_memory()
    versions = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return NodeReport(
        node,
        ", ".join(versions),
        clock_offset_s=clock_offset_s,
        host_total_bytes=memory.total,
        host_free_bytes=memory.available,
        problem=_node_problem(node, attempt),
    )


def seen_nodes(nodes: Sequence[str], attempt: Path) -> list[str]:
    """Return the nodes whose file in the shared folder this node sees."""
    with suppress(OSError):
        return [node for node in nodes if (attempt / f"reachable_{node}").exists()]
    return []


def bad_nodes(reports: Sequence[NodeReport]) -> dict[str, str]:
    """Return the names of the bad nodes with the first reason for each.

    A node is bad if it differs from at least half of all nodes; the first node gets no preference. If the nodes differ
    in two equal halves, as two different nodes do, all are bad: no majority shows which half is right.
    """
    bad: dict[str, str] = {}
    for report in reports:
        reason = report.problem or _difference(report, reports)
        if reason:
            bad.setdefault(report.node, reason)
    observers = [report for report in reports if report.seen is not None and not report.problem]
    for node in dict.fromkeys(report.node for report in reports):
        blind = [observer.node for observer in observers if node not in (observer.seen or ())]
        if blind and _at_least_half(blind, observers):
            bad.setdefault(node, f"what it writes into the run's folder is not seen by {blind[0]}: share the folder")
    return bad


def _at_least_half(some: Sequence[object], all_of_them: Sequence[object]) -> bool:
    return 2 * len(some) >= len(all_of_them)


def _difference(report: NodeReport, reports: Sequence[NodeReport]) -> str | None:
    others = [other for other in reports if other.node != report.node]
    other_versions = [other for other in others if other.versions != report.versions]
    if other_versions and _at_least_half(other_versions, reports):
        other = other_versions[0]
        return f"it has {report.versions}, {other.node} has {other.versions}: install the same"
    offsets = [report.clock_offset_s - other.clock_offset_s for other in others]
    too_large = [offset for offset in offsets if abs(offset) > MAX_CLOCK_OFFSET_S]
    if too_large and _at_least_half(too_large, reports):
        return f"its clock is {statistics.median(too_large):+.1f} s off those of other nodes"
    free_share = statistics.median(other.host_free_bytes / other.host_total_bytes for other in reports)
    if report.host_free_bytes < MIN_FREE_SHARE * free_share * report.host_total_bytes:
        free, total = report.host_free_bytes / 2**30, report.host_total_bytes / 2**30
        share = f"the median of the nodes is {free_share:.0%}"
        return f"only {free:.0f} of {total:.0f} GiB host memory are free, {share}: stop the processes that use it"
    return None


def _node_problem(node: str, attempt: Path) -> str | None:
    from grpo_mp.platform.machine_check import check_device

    try:
        check_device(int(os.environ.get("LOCAL_RANK", 0)))
        for folder in (SHARED_MEMORY, tempfile.gettempdir()):
            _check_local_disk(Path(folder))
        (attempt / f"reachable_{node}").touch()
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"the run's folder cannot be written to ({error.strerror})"
    except Exception as error:  # noqa: BLE001 - whatever a node does not do, it is bad
        return f"{type(error).__name__}: {one_line(error)}"
    return None


def _check_local_disk(folder: Path) -> None:
    """Raise UserError where a folder of the node itself takes no file: engines get weights and keep caches there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(LOCAL_BYTES))
            file.flush()
    except OSError as error:
        raise UserError(f"{folder} of this node takes no {LOCAL_BYTES:,} bytes ({error.strerror})") from error


if __name__ == "__main__":
    main()
