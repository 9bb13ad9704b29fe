"""Report on a node as one of its ranks sees it, and compare reports to find bad nodes."""

import importlib.metadata
import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from grpo_mp.errors import UserError

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "transformer-engine")
MAX_CLOCK_OFFSET_S = 5.0  # logs and traces of nodes are read side by side
MIN_FREE_SHARE = 0.5  # of host memory
MIN_RATE_SHARE = 0.5  # of the median rate


@dataclass(frozen=True)
class NodeReport:
    """One rank's report. Rates in bytes per second, None where they were not measured."""

    node: str
    versions: str
    clock_offset_s: float  # to rank 0
    host_total_bytes: int
    host_free_bytes: int
    problem: str | None  # what makes the node unfit by itself
    all_reduce: float | None = None  # inside the node
    all_to_all: float | None = None  # with other nodes

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def with_rates(self, all_reduce: float | None, all_to_all: float | None) -> "NodeReport":
        """Return the report with measured rates, bytes per second."""
        return replace(self, all_reduce=all_reduce, all_to_all=all_to_all)


def inspect_node(node: str, attempt: Path, clock_offset_s: float) -> NodeReport:
    """Report on this node; leave a file in the shared folder, so that rank 0 sees who reaches it."""
    memory = psutil.virtual_memory()
    return NodeReport(node, _versions(), clock_offset_s, memory.total, memory.available, _node_problem(node, attempt))


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
        return f"only {free:.0f} of {total:.0f} GiB host memory are free: end what holds it"
    return _slow_rate(report, reports)


def _slow_rate(report: NodeReport, reports: Sequence[NodeReport]) -> str | None:
    for name, rate, rates in (
        ("all-reduce inside the node", report.all_reduce, [other.all_reduce for other in reports]),
        ("all-to-all with other nodes", report.all_to_all, [other.all_to_all for other in reports]),
    ):
        if rate is None:
            continue
        median = statistics.median(other for other in rates if other is not None)
        if rate < MIN_RATE_SHARE * median:
            return f"{name} at {rate / 1e9:.2f} GB/s, the median is {median / 1e9:.2f}"
    return None


def _versions() -> str:
    versions = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(versions)


def _node_problem(node: str, attempt: Path) -> str | None:
    from grpo_mp.platform.device_check import check_device

    try:
        check_device(int(os.environ.get("LOCAL_RANK", 0)))
        (attempt / f"here_{node}").touch()
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"the run's folder cannot be written to ({error.strerror})"
    return None
