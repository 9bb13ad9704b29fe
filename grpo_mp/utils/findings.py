"""Results of checks of a machine, a model or a run, and their rendering as text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """Severity of a finding. WARNING: something could be better; ERROR: something is wrong."""

    OK = 0
    WARNING = 1
    ERROR = 2


FOUND_STATUS = 1  # exit status if a finding is an error; 2 is the status of a wrong command line


@dataclass(frozen=True)
class Finding:
    """Result of one check. Only findings about the metrics of a run have the fields from `rule` on.

    `rule`: name in monitor/rules.yaml. `weight`: importance, from 1 to 100. The rule applied at `steps` of the steps
    from `first_step` to `last_step`.
    """

    level: Level
    sentence: str
    evidence: Sequence[str] = ()  # lines
    advice: str = ""
    rule: str = ""
    metric: str = ""
    weight: int = 0
    first_step: int = 0
    last_step: int = 0
    steps: int = 0

    @property
    def where(self) -> str:
        if self.last_step == self.first_step:
            return f"step {self.first_step}"
        return f"{self.steps} of the steps {self.first_step} to {self.last_step}"


def render(findings: Iterable[Finding]) -> str:
    """Format findings as text, sorted by severity, errors first."""
    lines = []
    for finding in sorted(findings, key=lambda finding: -finding.level):
        where = f" ({finding.where})" if finding.rule else ""
        lines.append(f"{finding.level.name.lower()}: {finding.sentence}{where}")
        lines += [f"    {line}" for line in finding.evidence]
        if finding.advice:
            lines.append(f"  what to do: {finding.advice}")
    return "\n".join(lines)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return FOUND_STATUS if a finding is an error, else 0."""
    return FOUND_STATUS if any(finding.level is Level.ERROR for finding in findings) else 0
