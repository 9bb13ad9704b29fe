"""What is found about a machine, a model or a run: a sentence, its evidence, what to do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How much a finding matters. WARNING: something could be better; ERROR: something is wrong."""

    OK = 0
    WARNING = 1
    ERROR = 2


FOUND_STATUS = 1  # exit status where something is wrong; 2 is that of a wrong command line


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    sentence: str
    evidence: Sequence[str] = ()  # lines
    advice: str = ""


def render(findings: Iterable[Finding]) -> str:
    """Return the findings as text, those that matter most first."""
    lines = []
    for finding in sorted(findings, key=lambda finding: -finding.level):
        lines.append(f"{finding.level.name.lower()}: {finding.sentence}")
        lines += [f"    {line}" for line in finding.evidence]
        if finding.advice:
            lines.append(f"  what to do: {finding.advice}")
    return "\n".join(lines)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return FOUND_STATUS where a finding is an error, else 0."""
    return FOUND_STATUS if any(finding.level is Level.ERROR for finding in findings) else 0
