"""Is every node fit to train? `srun ... python -m grpo_mp.launch.nodes ATTEMPT NODES`, one task per rank.

NODES are the names of the allocation's nodes, separated by commas. Each rank reports what it sees; rank 0 judges,
names the bad nodes, and leaves their names in ATTEMPT/bad_nodes. Exit status 3 where a node is bad.
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
from grpo_mp.launch.node_report import NodeReport, bad_nodes, look_at_node
from grpo_mp.launch.rates import measure
from grpo_mp.launch.slurm import rank_environment

BAD_NODES = "bad_nodes"
BAD_STATUS = 3
ANSWER_LIMIT_S = 60.0
LIMIT = datetime.timedelta(seconds=ANSWER_LIMIT_S)


def main() -> None:
    """Command line."""
    attempt, names = Path(sys.argv[1]), sys.argv[2].split(",")
    try:
        os.environ.update(rank_environment(os.environ))
        status = NodeCheck.join(attempt, names).run()
    except UserError as error:
        exit_with(error)
    sys.stdout.flush()
    os._exit(status)  # without waiting for groups whose other ends may be the very ones that hang


@dataclass(frozen=True)
class NodeCheck:
    """One rank's part in the check."""

    attempt: Path
    names: Sequence[str]
    store: dist.Store
    rank: int
    world_size: int
    per_node: int

    @classmethod
    def join(cls, attempt: Path, names: Sequence[str]) -> "NodeCheck":
        """Meet the other ranks. Raises UserError where that fails."""
        store, rank, world_size = rendezvous(LIMIT)
        return cls(attempt, names, store, rank, world_size, int(os.environ["LOCAL_WORLD_SIZE"]))

    def run(self) -> int:
        """Look, tell rank 0, measure where all are fit so far; the exit status."""
        if self.rank == 0:
            self.store.set("clock", str(time.time()))
        self._wait(["clock"])
        offset = time.time() - float(self.store.get("clock"))
        report = look_at_node(self._name(self.rank), self.attempt, offset)
        self.store.set(f"looked/{self.rank}", json.dumps(report.as_dict()))
        if self.rank == 0:
            self.store.set("fit", str(self._judge(self._reports("looked"))))
        self._wait(["fit"])
        if status := int(self.store.get("fit")):
            return status
        self._measure(report)
        return self._judge(self._reports("measured")) if self.rank == 0 else 0

    def _measure(self, report: NodeReport) -> None:
        group = dist.PrefixStore("rates", self.store)
        kind, size = platform.backend(), self.world_size
        dist.init_process_group(kind, store=group, rank=self.rank, world_size=size, timeout=LIMIT)
        rates = measure([rank // self.per_node for rank in range(size)], self.rank)
        self.store.set(f"measured/{self.rank}", json.dumps(report.with_rates(**rates).as_dict()))

    def _judge(self, reports: list[NodeReport]) -> int:
        silent = {self._name(rank) for rank in range(self.world_size)} - {report.node for report in reports}
        bad = dict.fromkeys(silent, f"no answer in {ANSWER_LIMIT_S:g} s")
        unseen = [report.node for report in reports if not (self.attempt / f"here_{report.node}").exists()]
        bad |= bad_nodes(reports, unseen)
        for node, reason in bad.items():
            print(f"bad node {node}: {reason}")
        (self.attempt / BAD_NODES).write_text("\n".join(bad))
        return BAD_STATUS if bad else 0

    def _reports(self, what: str) -> list[NodeReport]:
        """Of the ranks that answered in time."""
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
        there = [key for key in keys if self.store.check([key])]
        return [NodeReport(**json.loads(text)) for text in self.store.multi_get(there)]

    def _wait(self, keys: list[str]) -> None:
        try:
            self.store.wait(keys, LIMIT * 2)
        except dist.DistError as error:
            raise UserError(f"node check: rank {self.rank} heard nothing from rank 0 in time") from error

    def _name(self, rank: int) -> str:
        return self.names[rank // self.per_node]


if __name__ == "__main__":
    main()
