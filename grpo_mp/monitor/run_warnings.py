"""What the rules find in the metrics of a run, as findings of `grpo-mp watch` and `grpo-mp doctor run`. Pure."""

from collections.abc import Iterable

from grpo_mp.findings import Finding, Level
from grpo_mp.monitor.rules import MetricLine, find_warnings


def run_warnings(lines: Iterable[MetricLine]) -> list[Finding]:
    """Return the warnings of a run's metrics, the heaviest first, each with what it means and what to do."""
    findings = []
    for warning in find_warnings(lines):
        seen = f"from step {warning.first_step} to {warning.last_step}"
        evidence = [warning.meaning, f"{seen}; the rule is from {warning.source}"]
        advice = f"{warning.action} ({warning.setting})" if warning.setting else warning.action
        findings.append(Finding(Level.WARNING, warning.sentence, evidence, advice))
    return findings
