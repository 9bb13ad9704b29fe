"""Check that every node is fit to train: `srun ... python -m grpo_mp.launch.nodes ATTEMPT NODES`, one task per rank.

NODES are the names of the allocation's nodes, separated by commas. Each rank reports on its node; rank 0
compares the reports, prints the bad nodes, and writes their names to ATTEMPT/bad_nodes. Exits with 3 where one is bad.
"""

import datetime
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.distributed.rates import measure_rates
from grpo_mp.distributed.rendezvous import rendezvous
from grpo_mp.errors import UserError, exit_with
from grpo_mp.launch.task import rank_environment
from grpo_mp.parsers import Parser

BAD_NODES = "bad_nodes"
BAD_NODES_STATUS = 3
TIMEOUT_S = 60.0
TIMEOUT = datetime.timedelta(seconds=TIMEOUT_S)
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "transformer-engine")
MAX_CLOCK_OFFSET_S = 5.0  # logs and traces of nodes are read side by side
MIN_FREE_SHARE = 0.5  # of host memory
MIN_RATE_SHARE = 0.5  # of the median rate
MIN_CPU_RATE_SHARE = 0.1  # the same where nothing is moved between GPUs: other programs share the cores


def main() -> None:
    """Run the command line."""
    parser = Parser("python -m grpo_mp.launch.nodes", str(__doc__))
    parser.add_argument("attempt", type=Path)
    parser.add_argument("nodes")
    try:
        args = parser.parse_args()
        os.environ.update(rank_environment(os.environ))
        nodes, ranks_per_node = args.nodes.split(","), int(os.environ["LOCAL_WORLD_SIZE"])
        store, rank, world_size = rendezvous(TIMEOUT)
        status = NodeCheck(args.attempt, nodes, store, rank, world_size, ranks_per_node).run()
    except UserError as error:
        exit_with(error)
    sys.stdout.flush()
    os._exit(status)  # without waiting for groups whose other ends may be the very ones that hang


@dataclass(frozen=True)
class NodeReport:
    """One rank's report. Rates in bytes per second, None where they were not measured."""

    node: str
    versions: str
    clock_offset_s: float  # to rank 0
    host_total_bytes: int
    host_free_bytes: int
    problem: str | None  # what makes the node unfit by itself
    gpus: bool = True
    all_reduce: float | None = None  # inside the node
    all_to_all: float | None = None  # with other nodes


@dataclass(frozen=True)
class NodeCheck:
    """One rank's part in the check."""

    attempt: Path
    nodes: Sequence[str]  # names
    store: dist.Store
    rank: int
    world_size: int
    ranks_per_node: int

    def run(self) -> int:
        """Report to rank 0, and where all nodes are fit so far, measure rates; return the exit status."""
        if self.rank == 0:
            self.store.set("clock", str(time.time()))
        self._wait(["clock"])
        offset = time.time() - float(self.store.get("clock"))
        report = inspect_node(self._node_of(self.rank), self.attempt, offset)
        self.store.set(f"inspected/{self.rank}", json.dumps(asdict(report)))
        if self.rank == 0:
            self.store.set("fit", str(self._check_reports(self._reports("inspected"))))
        self._wait(["fit"])
        if status := int(self.store.get("fit")):
            return status
        store, size = dist.PrefixStore("rates", self.store), self.world_size
        dist.init_process_group(platform.backend(), store=store, rank=self.rank, world_size=size, timeout=TIMEOUT)
        all_reduce, all_to_all = measure_rates([rank // self.ranks_per_node for rank in range(size)], self.rank)
        report = replace(report, all_reduce=all_reduce, all_to_all=all_to_all)
        self.store.set(f"measured/{self.rank}", json.dumps(asdict(report)))
        return self._check_reports(self._reports("measured")) if self.rank == 0 else 0

    def _check_reports(self, reports: list[NodeReport]) -> int:
        silent = {self._node_of(rank) for rank in range(self.world_size)} - {report.node for report in reports}
        bad = dict.fromkeys(silent, f"no answer in {TIMEOUT_S:g} s")
        missing = [report.node for report in reports if not (self.attempt / f"reachable_{report.node}").exists()]
        bad |= bad_nodes(reports, missing)
        for node, reason in bad.items():
            print(f"bad node {node}: {reason}")
        (self.attempt / BAD_NODES).write_text("\n".join(bad))
        return BAD_NODES_STATUS if bad else 0

    def _reports(self, stage: str) -> list[NodeReport]:
        """Return the reports of the ranks that answer in time."""
        keys = [f"{stage}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + TIMEOUT_S
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
        answered = [key for key in keys if self.store.check([key])]
        return [NodeReport(**json.loads(text)) for text in self.store.multi_get(answered)]

    def _wait(self, keys: list[str]) -> None:
        try:
            self.store.wait(keys, TIMEOUT * 2)
        except dist.DistError as error:
            raise UserError(f"node check: rank {self.rank} got no answer from rank 0 in {2 * TIMEOUT_S:g} s") from error

    def _node_of(self, rank: int) -> str:
        return self.nodes[rank // self.ranks_per_node]


def inspect_node(node: str, attempt: Path, clock_offset_s: float) -> NodeReport:
    """Report on this node; leave a file in the shared folder, so that rank 0 sees who reaches it."""
    memory = psutil.virtual_memory()
    versions = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    problem, gpus = _node_problem(node, attempt), platform.on_cuda()
    return NodeReport(node, ", ".join(versions), clock_offset_s, memory.total, memory.available, problem, gpus)


def bad_nodes(reports: Sequence[NodeReport], missing: Iterable[str] = ()) -> dict[str, str]:
    """Return the bad nodes with the first reason of each. `missing`: nodes whose file rank 0 does not see. Pure."""
    bad: dict[str, str] = {}
    for report in reports:
        reason = report.problem or _difference(report, reports)
        if reason:
            bad.setdefault(report.node, reason)
    for node in missing:
        bad.setdefault(node, "what it writes into the run's folder is not seen by the first node: share the folder")
    return bad


def _difference(report: NodeReport, reports: Sequence[NodeReport]) -> str | None:
    first = reports[0]
    if report.versions != first.versions:
        return f"it has {report.versions}, {first.node} has {first.versions}: install the same"
    if abs(report.clock_offset_s) > MAX_CLOCK_OFFSET_S:
        return f"its clock is {report.clock_offset_s:+.1f} s off that of {first.node}"
    if report.host_free_bytes < MIN_FREE_SHARE * report.host_total_bytes:
        free, total = report.host_free_bytes / 2**30, report.host_total_bytes / 2**30
        return f"only {free:.0f} of {total:.0f} GiB host memory are free: stop the processes that use it"
    return _slow_rate(report, reports)


def _slow_rate(report: NodeReport, reports: Sequence[NodeReport]) -> str | None:
    for name, rate, rates in (
        ("all-reduce inside the node", report.all_reduce, [other.all_reduce for other in reports]),
        ("all-to-all with other nodes", report.all_to_all, [other.all_to_all for other in reports]),
    ):
        if rate is None:
            continue
        median = statistics.median(other for other in rates if other is not None)
        if rate < (MIN_RATE_SHARE if report.gpus else MIN_CPU_RATE_SHARE) * median:
            return f"{name} at {rate / 1e9:.2f} GB/s, the median is {median / 1e9:.2f}"
    return None


def _node_problem(node: str, attempt: Path) -> str | None:
    from grpo_mp.platform.device_check import check_device

    try:
        check_device(int(os.environ.get("LOCAL_RANK", 0)))
        (attempt / f"reachable_{node}").touch()
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"the run's folder cannot be written to ({error.strerror})"
    return None


if __name__ == "__main__":
    main()
