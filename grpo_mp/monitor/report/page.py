"""Build the report of runs and render it as one HTML file without external resources."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_mp.monitor.report.answers import Answer, choose_answers
from grpo_mp.monitor.report.charts import Chart, draw, legend
from grpo_mp.monitor.report.curves import charts_of, score_charts
from grpo_mp.monitor.report.tables import (
    Table,
    scores_table,
    settings_tables,
    summary_table,
    time_table,
    verdict,
)
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.run_folder import RunRecords
from grpo_mp.utils.findings import Finding

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # Content-Security-Policy


@dataclass(frozen=True)
class Section:
    """A section of the page with the anchor `key`. `missing`: text that an empty section shows."""

    key: str
    title: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    answers: tuple[Answer, ...] = ()
    missing: str = "The run wrote nothing of this."


@dataclass(frozen=True)
class Report:
    """Contents of the page. `verdicts`: one sentence per run; `warnings`: pairs of run name and finding."""

    runs: tuple[str, ...]
    verdicts: tuple[str, ...]
    warnings: tuple[tuple[str, Finding], ...]
    sections: tuple[Section, ...]


def build_report(runs: Sequence[RunRecords]) -> Report:
    """Return the report of one or several runs."""
    scores, (no_scores, no_samples) = scores_table(runs), _missing(runs)
    score_tables = (scores,) if scores.rows else ()
    answers = tuple(answer for run in runs for answer in choose_answers(run))
    sections = (
        Section("run", "What was run", tables=(summary_table(runs), *settings_tables(runs))),
        Section("scores", "Before and after", score_charts(runs), score_tables, missing=no_scores),
        Section("reward", "Reward", charts_of("reward", runs)),
        Section("lengths", "Lengths", charts_of("lengths", runs)),
        Section("policy", "Policy and engine", charts_of("policy", runs)),
        Section("time", "Where the time went", charts_of("time", runs), (time_table(runs),)),
        Section("memory", "Memory", charts_of("memory", runs)),
        Section("samples", "Answers to read", answers=answers, missing=no_samples),
    )
    found = {run.name: find_warnings(run.metrics) for run in runs}
    warnings = sorted(((name, one) for name, ones in found.items() for one in ones), key=lambda pair: -pair[1].weight)
    verdicts = tuple(verdict(run, len(found[run.name])) for run in runs)
    return Report(tuple(found), verdicts, tuple(warnings), sections)


def _missing(runs: Sequence[RunRecords]) -> tuple[str, str]:
    if all(any("sft/loss" in line for line in run.metrics) for run in runs):
        return (
            "Supervised fine-tuning scores no answers: its loss on held-out rows is under Policy and engine.",
            "Supervised fine-tuning generates no answers.",
        )
    return (
        "No evaluation was run: data.eval and run.eval_every ask for it.",
        "No samples.",
    )


def render(report: Report) -> str:
    """Return the page as HTML. All text is escaped: answers come from a model, names and settings from a user."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = [chart for section in report.sections for chart in section.charts]
    drawn = {id(chart): Markup(draw(chart, str(number))) for number, chart in enumerate(charts)}
    return environment.get_template("page.html").render(
        report=report,
        several=len(report.runs) > 1,
        draw=lambda chart: drawn[id(chart)],
        legend=legend,
        policy=POLICY,
    )
