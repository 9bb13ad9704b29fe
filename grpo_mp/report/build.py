"""Turn the records of runs into a report. Pure."""

from collections.abc import Sequence

from grpo_mp.report.answers import choose_answers, solve_rate_charts
from grpo_mp.report.contents import Report, Section
from grpo_mp.report.curves import charts_of
from grpo_mp.report.overview import score_charts, scores_table, settings_tables, summary_table, time_table
from grpo_mp.report.records import RunRecords


def build_report(runs: Sequence[RunRecords]) -> Report:
    """Return the report of one or several runs. Raises UserError for a preset that does not exist."""
    scores = scores_table(runs)
    answers = tuple(answer for run in runs for answer in choose_answers(run))
    sections = (
        Section("run", "What was run", tables=(summary_table(runs), *settings_tables(runs))),
        Section(
            "scores",
            "Before and after",
            score_charts(runs),
            (scores,) if scores.rows else (),
            missing="No evaluation was run: data.eval and run.eval_every ask for it.",
        ),
        Section("reward", "Reward", (*charts_of("reward", runs), *solve_rate_charts(runs))),
        Section("lengths", "Lengths", charts_of("lengths", runs)),
        Section("policy", "Policy and engine", charts_of("policy", runs)),
        Section("time", "Where the time went", charts_of("time", runs), (time_table(runs),)),
        Section("memory", "Memory", charts_of("memory", runs)),
        Section(
            "samples", "Answers to read", answers=answers, missing="No samples: monitor.samples_per_step asks for them."
        ),
    )
    return Report(tuple(run.name for run in runs), sections)
