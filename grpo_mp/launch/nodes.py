"""Check that every node is fit to train: `srun ... python -m grpo_mp.launch.nodes ATTEMPT NODES`, one task per rank.

NODES are the names of the allocation's nodes, separated by commas. Each rank reports on its node; rank 0
compares the reports, prints the bad nodes, and writes their names to ATTEMPT/bad_nodes. Exits with 3 where one is bad.
"""

import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.config import exit_with
from grpo_mp.distributed.rendezvous import rendezvous
from grpo_mp.errors import UserError
from grpo_mp.launch.node_report import NodeReport, bad_nodes, inspect_node
from grpo_mp.launch.rates import measure_rates
from grpo_mp.launch.slurm import rank_environment
from grpo_mp.options import Parser

BAD_NODES = "bad_nodes"
BAD_NODES_STATUS = 3
TIMEOUT_S = 60.0
TIMEOUT = datetime.timedelta(seconds=TIMEOUT_S)


def main() -> None:
    """Run the command line."""
    parser = Parser("python -m grpo_mp.launch.nodes", str(__doc__))
    parser.add_argument("attempt", type=Path)
    parser.add_argument("nodes")
    try:
        args = parser.parse_args()
        os.environ.update(rank_environment(os.environ))
        status = NodeCheck.join(args.attempt, args.nodes.split(",")).run()
    except UserError as error:
        exit_with(error)
    sys.stdout.flush()
    os._exit(status)  # without waiting for groups whose other ends may be the very ones that hang


@dataclass(frozen=True)
class NodeCheck:
    """One rank's part in the check."""

    attempt: Path
    nodes: Sequence[str]  # names
    store: dist.Store
    rank: int
    world_size: int
    ranks_per_node: int

    @classmethod
    def join(cls, attempt: Path, nodes: Sequence[str]) -> "NodeCheck":
        """Join the other ranks. Raises UserError where that fails."""
        store, rank, world_size = rendezvous(TIMEOUT)
        return cls(attempt, nodes, store, rank, world_size, int(os.environ["LOCAL_WORLD_SIZE"]))

    def run(self) -> int:
        """Report to rank 0, and where all nodes are fit so far, measure rates; return the exit status."""
        if self.rank == 0:
            self.store.set("clock", str(time.time()))
        self._wait(["clock"])
        offset = time.time() - float(self.store.get("clock"))
        report = inspect_node(self._node_of(self.rank), self.attempt, offset)
        self.store.set(f"inspected/{self.rank}", json.dumps(report.as_dict()))
        if self.rank == 0:
            self.store.set("fit", str(self._check_reports(self._reports("inspected"))))
        self._wait(["fit"])
        if status := int(self.store.get("fit")):
            return status
        self._measure_rates(report)
        return self._check_reports(self._reports("measured")) if self.rank == 0 else 0

    def _measure_rates(self, report: NodeReport) -> None:
        store, size = dist.PrefixStore("rates", self.store), self.world_size
        dist.init_process_group(platform.backend(), store=store, rank=self.rank, world_size=size, timeout=TIMEOUT)
        rates = measure_rates([rank // self.ranks_per_node for rank in range(size)], self.rank)
        self.store.set(f"measured/{self.rank}", json.dumps(report.with_rates(**rates).as_dict()))

    def _check_reports(self, reports: list[NodeReport]) -> int:
        silent = {self._node_of(rank) for rank in range(self.world_size)} - {report.node for report in reports}
        bad = dict.fromkeys(silent, f"no answer in {TIMEOUT_S:g} s")
        missing = [report.node for report in reports if not (self.attempt / f"here_{report.node}").exists()]
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
            raise UserError(f"node check: rank {self.rank} heard nothing from rank 0 in time") from error

    def _node_of(self, rank: int) -> str:
        return self.nodes[rank // self.ranks_per_node]


if __name__ == "__main__":
    main()
