"""Check the nodes of a job: `srun ... python -m grpo_mp.cli.slurm_nodes ATTEMPT NODES`, one task per rank.

NODES: names of the nodes, separated by commas. Rank 0 compares the reports of all ranks, prints the bad nodes, and
writes their names to ATTEMPT/bad_nodes; its exit status is 3 if a node is bad.
"""

import datetime
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from grpo_mp.cli.slurm_job import BAD_NODES, SAVED_STEP
from grpo_mp.cli.slurm_task import rank_environment
from grpo_mp.distributed.rendezvous import rendezvous
from grpo_mp.utils.errors import UserError, exit_with, one_line
from grpo_mp.utils.parsers import Parser

BAD_NODES_STATUS = 3
TIMEOUT_S = 60.0
TIMEOUT = datetime.timedelta(seconds=TIMEOUT_S)
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "transformer-engine")


def main() -> None:
    """Run the command line."""
    parser = Parser("python -m grpo_mp.cli.slurm_nodes", str(__doc__))
    parser.add_argument("attempt", type=Path)
    parser.add_argument("nodes")
    try:
        args = parser.parse_args()
        os.environ.update(rank_environment(os.environ))
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        store, rank, world_size = rendezvous(TIMEOUT)
        nodes = [node for node in args.nodes.split(",") for _ in range(per_node)]
        status = check_nodes(args.attempt, nodes[:world_size], store, rank)
    except UserError as error:
        exit_with(error)
    sys.stdout.flush()
    os._exit(status)  # does not wait for the store, whose clients may hang


@dataclass(frozen=True)
class NodeReport:
    """Report of one rank on its node."""

    node: str
    versions: str
    problem: str = ""  # reason to reject the node without a comparison with the other nodes


def check_nodes(attempt: Path, node_of_rank: Sequence[str], store: dist.Store, rank: int) -> int:
    """Send a report to rank 0, which compares the nodes; return the exit status, which is 0 on the other ranks."""
    report = inspect_node(node_of_rank[rank], attempt)
    store.set(f"report/{rank}", json.dumps(asdict(report)))
    if rank:
        return 0
    reports = _collect_reports(store, len(node_of_rank))
    answered = [report.node for report in reports]
    silent = [node for node in node_of_rank if answered.count(node) < node_of_rank.count(node)]
    bad = dict.fromkeys(silent, f"no answer in {TIMEOUT_S:g} s") | bad_nodes(reports)
    for node, reason in bad.items():
        print(f"bad node {node}: {reason}")
    (attempt / BAD_NODES).write_text("\n".join(bad))
    return BAD_NODES_STATUS if bad else 0


def _collect_reports(store: dist.Store, ranks: int) -> list[NodeReport]:
    keys = [f"report/{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + TIMEOUT_S
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [NodeReport(**json.loads(store.get(key))) for key in keys if store.check([key])]


def inspect_node(node: str, attempt: Path) -> NodeReport:
    """Return this rank's report on its node."""
    versions = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return NodeReport(node, ", ".join(versions), _node_problem(attempt))


def _node_problem(attempt: Path) -> str:
    from grpo_mp.platform.machine_check import check_start

    try:
        check_start(int(os.environ.get("LOCAL_RANK", 0)))
        if not (attempt / SAVED_STEP).exists():  # the batch script wrote it
            return f"it does not see {attempt}: the run's folder must be on a file system that all nodes share"
    except UserError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a node on which anything fails is bad
        return f"{type(error).__name__}: {one_line(error)}"
    return ""


def bad_nodes(reports: Sequence[NodeReport]) -> dict[str, str]:
    """Return the bad nodes: name -> first reason."""
    usual = statistics.mode(report.versions for report in reports)  # on a tie, those of the first rank
    bad: dict[str, str] = {}
    for report in reports:
        odd = f"it has {report.versions}, other nodes have {usual}: install the same"
        if reason := report.problem or (odd if report.versions != usual else ""):
            bad.setdefault(report.node, reason)
    return bad


if __name__ == "__main__":
    main()
