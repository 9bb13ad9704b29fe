"""What a report holds: sections of charts, tables and answers. Data only; the page decides how they look."""

import math
from dataclasses import dataclass

from grpo_mp.utils.findings import Finding


@dataclass(frozen=True)
class Series:
    """A line: `values[i]` at `x[i]`, ascending; a band from `low` to `high` where they are given, as long as `x`.

    A value that is not finite is a gap. `run`: the run of the report that it is of; `color`, `dash`: how it is drawn.
    """

    name: str
    x: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    run: int = 0
    color: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis, or with `stacked` areas on top of each other. `note` says how to read it."""

    title: str
    unit: str
    series: tuple[Series, ...]
    note: str = ""
    x_label: str = "step"
    stacked: bool = False


@dataclass(frozen=True)
class HeatMap:
    """Shares from 0 to 1, `shares[row][column]`, by name of the row and place of the column, lowest row first."""

    title: str
    unit: str
    rows: tuple[str, ...]
    x: tuple[float, ...]
    shares: tuple[tuple[float, ...], ...]
    note: str = ""
    x_label: str = "step"
    run: int = 0


@dataclass(frozen=True)
class Bar:
    """A span of a lane, in seconds; `kind`: its place among the kinds of the chart."""

    kind: int
    start: float
    length: float


@dataclass(frozen=True)
class Lanes:
    """Spans over time, `bars[i]` of lane `rows[i]`."""

    title: str
    kinds: tuple[str, ...]
    rows: tuple[str, ...]
    bars: tuple[tuple[Bar, ...], ...]
    note: str = ""
    run: int = 0


Picture = Chart | HeatMap | Lanes


@dataclass(frozen=True)
class Table:
    """Rows of text below names of columns. `runs`: the run that each row is of; (): all rows are of all runs."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    runs: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Token:
    """A token of an answer as text, with its logprobs and its advantage, None where they are not known."""

    text: str
    engine: float
    policy: float | None
    advantage: float | None

    @property
    def mismatch(self) -> float | None:
        """Return the absolute difference of both logprobs in nats; None where one is not known, or no number."""
        if self.policy is None or math.isnan(self.engine):
            return None
        return abs(self.policy - self.engine)


@dataclass(frozen=True)
class Answer:
    """A sampled answer to read. `why` says what it is an example of; `facts` are its numbers in words.

    `tokens`: some of it, to be coloured; (): none were kept. `judged`: right, wrong, or "" where nothing says so.
    """

    why: str
    run: int
    step: int
    prompt: str
    expected: str
    response: str
    facts: str
    tokens: tuple[Token, ...] = ()
    judged: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page; `key` is its anchor. `missing` says why there is nothing where there is nothing."""

    key: str
    title: str
    charts: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    answers: tuple[Answer, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Report:
    """The page of runs: `runs` are their names, unique."""

    runs: tuple[str, ...]
    sections: tuple[Section, ...]
    warnings: tuple[tuple[int, Finding], ...] = ()  # each with its run
    verdicts: tuple[str, ...] = ()  # a sentence for each run: steps, warnings, scores before and after
