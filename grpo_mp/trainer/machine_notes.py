"""What the machines of a job look like at its start: each finding once, with the ranks that have it."""

import os
import socket
from collections.abc import Iterable, Sequence

from grpo_mp.distributed.process_groups import Job, all_gather
from grpo_mp.platform.machine_check import quick_findings
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.findings import Finding, Level

HostFindings = tuple[str, Sequence[Finding]]  # of a rank


def machine_notes(job: Job) -> list[str]:
    """Return a sentence for each thing that is wrong. Every rank must call this.

    Raises UserError, alike on all ranks, where a machine is unfit.
    """
    findings = quick_findings() if int(os.environ.get("LOCAL_RANK", 0)) == 0 else []
    return describe(all_gather((socket.gethostname(), findings), job.group))


def describe(by_rank: Sequence[HostFindings]) -> list[str]:
    """Return a sentence for each finding, with all ranks that have it. Pure. Raises UserError for the errors."""
    places: dict[Finding, list[tuple[str, int]]] = {}
    for rank, (host, findings) in enumerate(by_rank):
        for finding in findings:
            key = Finding(finding.level, finding.sentence, (), finding.advice)
            places.setdefault(key, []).append((host, rank))
    sentences = {finding: f"{_where(at)}: {finding.sentence}: {finding.advice}" for finding, at in places.items()}
    errors = [text for finding, text in sentences.items() if finding.level is Level.ERROR]
    if errors:
        raise UserError("; ".join(errors))
    return list(sentences.values())


def _where(places: Iterable[tuple[str, int]]) -> str:
    hosts = dict.fromkeys(host for host, _ in places)
    return ", ".join(f"{host} (rank {', '.join(str(rank) for at, rank in places if at == host)})" for host in hosts)
