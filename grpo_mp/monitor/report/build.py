"""Turn the records of runs into a report."""

from collections.abc import Sequence

from grpo_mp.monitor.report.answers import choose_answers
from grpo_mp.monitor.report.contents import Chart, Report, Section
from grpo_mp.monitor.report.curves import charts_of, solve_rate_maps
from grpo_mp.monitor.report.overview import (
    score_charts,
    scores_table,
    settings_tables,
    summary_table,
    time_table,
    verdict,
)
from grpo_mp.monitor.report.times import last_steps, memory_tables, plan_tables, rank_tables
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.run_folder import RunRecords
from grpo_mp.utils.findings import Finding

# Beside scores; of several runs, with a name.
PICTURED = ("Reward", "Response length", "Supervised loss", "Entropy", "Phases of a step")


def build_report(runs: Sequence[RunRecords]) -> Report:
    """Return the report of one or several runs."""
    scores, (no_scores, no_samples) = scores_table(runs), _missing(runs)
    answers = tuple(answer for place, run in enumerate(runs) for answer in choose_answers(run, place))
    sections = (
        Section("run", "What was run", tables=(summary_table(runs), *settings_tables(runs))),
        Section(
            "scores",
            "Before and after",
            score_charts(runs),
            (scores,) if scores.rows else (),
            missing=no_scores,
        ),
        Section("reward", "Reward", (*charts_of("reward", runs), *solve_rate_maps(runs))),
        Section("lengths", "Lengths", charts_of("lengths", runs)),
        Section("policy", "Policy and engine", charts_of("policy", runs)),
        Section(
            "time",
            "Where the time went",
            (*charts_of("time", runs), *last_steps(runs)),
            (time_table(runs), *rank_tables(runs), *plan_tables(runs)),
        ),
        Section("memory", "Memory", charts_of("memory", runs), memory_tables(runs)),
        Section("samples", "Answers to read", answers=answers, missing=no_samples),
    )
    warnings = find_all_warnings(runs)
    verdicts = tuple(verdict(run, sum(of == place for of, _ in warnings)) for place, run in enumerate(runs))
    return Report(tuple(run.name for run in runs), sections, warnings, verdicts)


def _missing(runs: Sequence[RunRecords]) -> tuple[str, str]:
    """Return what to say where there are no scores, and no answers."""
    if all(any("sft/loss" in line for line in run.metrics) for run in runs):
        return (
            "Supervised fine-tuning scores no answers: its loss on held-out rows stands under Policy and engine.",
            "Supervised fine-tuning generates no answers.",
        )
    return (
        "No evaluation was run: data.eval and run.eval_every ask for it.",
        "No samples: monitor.samples_per_step asks for them.",
    )


def main_charts(runs: Sequence[RunRecords]) -> tuple[Chart, ...]:
    """Return the charts of a report that say most at a glance: scores, reward, length, entropy, phases."""
    charts = [one for key in ("reward", "lengths", "policy", "time") for one in charts_of(key, runs)]
    return (*score_charts(runs), *(one for one in charts if one.title.split(", ")[0] in PICTURED))


def find_all_warnings(runs: Sequence[RunRecords]) -> tuple[tuple[int, Finding], ...]:
    """Return the findings of each run with its place, the heaviest first."""
    found = [(place, one) for place, run in enumerate(runs) for one in find_warnings(run.metrics)]
    return tuple(sorted(found, key=lambda pair: -pair[1].weight))
