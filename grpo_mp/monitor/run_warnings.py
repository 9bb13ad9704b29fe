"""What the rules find in the metrics of a run, as findings of `grpo-mp watch` and `grpo-mp doctor run`. Pure."""

from collections.abc import Iterable

from grpo_mp.monitor.rules import Finding as Warning
from grpo_mp.monitor.rules import MetricLine, find_warnings
from grpo_mp.utils.findings import Finding, Level

SPOILS = 80  # from this weight on a warning says that what the run makes is spoiled; below, that it could be better


def run_warnings(lines: Iterable[MetricLine]) -> list[Finding]:
    """Return the warnings of a run's metrics as `to_findings` does, the heaviest first."""
    return to_findings(find_warnings(lines))


def to_findings(warnings: Iterable[Warning], step: int | None = None) -> list[Finding]:
    """Return warnings with what each means and what to do, in their order.

    `step`: the last of a run that is watched: what no longer holds then comes last, and says until when it did. Those
    of weight SPOILS or more are errors, also where they have passed: what was spoiled then is in the weights.
    """
    findings = []
    for warning in warnings if step is None else sorted(warnings, key=lambda one: one.last_step < step):
        seen = f"at step {warning.first_step}"
        if warning.last_step > warning.first_step:
            seen = f"at {warning.steps} of the steps {warning.first_step} to {warning.last_step}"
        evidence = [warning.meaning, f"{seen}; the rule is from {warning.source}", f"weight {warning.weight} of 100"]
        advice = f"{warning.action} ({warning.setting})" if warning.setting else warning.action
        level = Level.ERROR if warning.weight >= SPOILS else Level.WARNING
        has_passed = step is not None and warning.last_step < step
        sentence = f"{warning.sentence} (until step {warning.last_step})" if has_passed else warning.sentence
        findings.append(Finding(level, sentence, evidence, advice))
    return findings
