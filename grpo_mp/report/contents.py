"""What a report holds: sections of charts, tables and answers. Data only; the page decides how they look."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """A line: `values[i]` at `x[i]`, ascending; a band from `low` to `high` where they are given, as long as `x`."""

    name: str
    x: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


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
class Table:
    """Rows of text below names of columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Answer:
    """A sampled answer to read. `why` says what it is an example of; `facts` are its numbers in words."""

    why: str
    run: str
    step: int
    prompt: str
    expected: str
    response: str
    facts: str


@dataclass(frozen=True)
class Section:
    """A part of the page; `key` is its anchor. `missing` says why there is nothing where there is nothing."""

    key: str
    title: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    answers: tuple[Answer, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Warning:
    """What a rule found in a run, and what to try."""

    run: str
    text: str
    action: str


@dataclass(frozen=True)
class Report:
    """The page of runs: `runs` are their names, unique."""

    runs: tuple[str, ...]
    sections: tuple[Section, ...]
    warnings: tuple[Warning, ...] = ()
