"""The report of a run: warnings, settings, scores, charts, times and answers in one HTML file."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_mp.monitor.progress import score_changes
from grpo_mp.monitor.report.charts import Chart, draw, legend
from grpo_mp.monitor.report.curves import charts_of, score_charts
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.run_folder import Line, RunRecords
from grpo_mp.monitor.samples import evenly_spaced
from grpo_mp.utils.files import encodable
from grpo_mp.utils.findings import Finding

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # Content-Security-Policy
CHARACTERS = 4000  # longer texts are cut in the middle
STEPS = 4  # steps whose answers are shown
# Recurring questions, and how often each is shown
QUESTIONS = 2
TIMES = 6
PLACE = re.compile(r"^prompt \d+, sample \d+(?:, turn \d+)?: ")  # begins the error of an episode
KIND_CHARACTERS = 160  # of an error, by which failures are counted
KINDS = 10  # rows of the table of failures


@dataclass(frozen=True)
class Table:
    """A table of text cells. `folded`: the table opens on a click."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False


@dataclass(frozen=True)
class Turn:
    """A message of an episode after its prompt. `role`: who wrote it, and whether it is trained on."""

    role: str
    text: str


@dataclass(frozen=True)
class Answer:
    """A sampled answer. `why`: reason for the selection, such as "best"; `facts`: reward, correctness and length."""

    why: str
    step: int
    prompt: str
    expected: str
    response: str
    facts: str
    turns: Sequence[Turn] = ()  # of an episode


@dataclass(frozen=True)
class Section:
    """A section of the page with the anchor `key`."""

    key: str
    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    answers: Sequence[Answer] = ()


@dataclass(frozen=True)
class Report:
    """Contents of the page. `verdict`: a sentence about the whole run."""

    run: str
    verdict: str
    warnings: Sequence[Finding]
    sections: Sequence[Section]


def build_report(run: RunRecords) -> Report:
    """Return the report of a run; sections without contents are left out."""
    warnings = find_warnings(run.metrics)
    sections = (
        Section("run", "What was run", tables=[settings_table(run)]),
        Section("scores", "Before and after", [*score_charts(run)], scores_tables(run)),
        Section("reward", "Reward", charts_of("reward", run)),
        Section("lengths", "Lengths", charts_of("lengths", run)),
        Section("policy", "Policy and engine", charts_of("policy", run)),
        Section("time", "Where the time went", charts_of("time", run), [time_table(run)]),
        Section("memory", "Memory", charts_of("memory", run)),
        Section(
            "samples",
            "Answers to read",
            tables=failure_tables(run),
            answers=[*choose_answers(run), *recurring_questions(run)],
        ),
    )
    filled = [section for section in sections if section.charts or section.tables or section.answers]
    return Report(run.name, verdict(run, len(warnings)), warnings, filled)


def render(report: Report) -> str:
    """Return the page as HTML. All text is escaped: answers come from a model, names and settings from a user."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = [chart for section in report.sections for chart in section.charts]
    drawn = {id(chart): Markup(draw(chart, str(number))) for number, chart in enumerate(charts)}
    template = environment.get_template("page.html")
    return template.render(report=report, draw=lambda chart: drawn[id(chart)], legend=legend, policy=POLICY)


def verdict(run: RunRecords, warnings: int) -> str:
    """Return a sentence with a run's steps, number of warnings, and first and last accuracy on each eval set."""
    before, after = (run.scores[min(run.scores)], run.scores[max(run.scores)]) if run.scores else ({}, {})
    changes = [
        f"{name} {before[name].accuracy:.1%} → {score.accuracy:.1%}"
        for name, score in after.items()
        if name in before and None not in (score.accuracy, before[name].accuracy)
    ]
    found = f"{warnings} warning{'s' * (warnings > 1)}" if warnings else "no warnings"
    steps = f"{run.metrics[-1]['step']:g} of {run.settings.get('run', {}).get('steps', '?')} steps"
    return "; ".join([steps, found, *changes])


def settings_table(run: RunRecords) -> Table:
    """Return a table of all settings."""
    return Table("Every setting", ("setting", "value"), tuple(flatten(run.settings)), folded=True)


def flatten(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value of each setting as text."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)


def scores_tables(run: RunRecords) -> list[Table]:
    """Return a table of each eval set's scores at the first and the last evaluation; none without an evaluation."""
    if not run.scores:
        return []
    first = run.scores[min(run.scores)]
    last = run.scores[max(run.scores)]
    before = first if len(run.scores) > 1 else {}
    rows = [(name, *row) for name, score in last.items() for row in score_changes(before.get(name), score)]
    return [Table("Before and after", ("set", "measure", "before", "after", "after - before"), tuple(rows))]


def time_table(run: RunRecords) -> Table:
    """Return a table of each phase's mean seconds per step and share of the step."""
    steps = [line for line in run.metrics if isfinite(line.get("time/step_s", float("nan")))]
    names = dict.fromkeys(name for line in steps for name in line if re.fullmatch(r"time/[a-z_]+_s", name))
    rows = []
    for name in names:
        pairs = [(line.get(name, 0.0), line["time/step_s"]) for line in steps if isfinite(line.get(name, 0.0))]
        if whole := sum(step for _, step in pairs):
            part = fmean(seconds for seconds, _ in pairs)
            rows.append((name[5:-2], f"{part:.3g} s ({part * len(pairs) / whole:.1%})"))
    return Table("Seconds of a step, mean", ("phase", "seconds"), tuple(rows))


def failure_tables(run: RunRecords) -> list[Table]:
    """Return a table of the failed episodes by kind, empty if none failed."""
    lines = [line for by_step in (run.samples, run.eval_samples) for part in by_step.values() for line in part]
    kinds = Counter(PLACE.sub("", str(line["error"]))[:KIND_CHARACTERS] for line in lines if line.get("error"))
    rows = tuple((kind, str(count)) for kind, count in kinds.most_common(KINDS))
    return (
        [Table(f"Failed episodes, of {len(lines)} samples that were read", ("failure", "episodes"), rows)]
        if rows
        else []
    )


def choose_answers(run: RunRecords) -> Iterator[Answer]:
    """Yield the best, worst and longest answer of some steps."""
    steps = sorted(step for step, lines in run.samples.items() if lines)
    for step in dict.fromkeys([*evenly_spaced(steps, STEPS - 1), *steps[-1:]]):
        lines = run.samples[step]
        if rewarded := [line for line in lines if line.get("reward") is not None]:
            yield _answer("best", step, max(rewarded, key=lambda line: float(line["reward"])))
            yield _answer("worst", step, min(rewarded, key=lambda line: float(line["reward"])))
        yield _answer("longest", step, max(lines, key=lambda line: int(line.get("tokens", 0))))


def recurring_questions(run: RunRecords) -> Iterator[Answer]:
    """Yield the first answer to each recurring question at several steps: of evaluations if any, else of training."""
    source = run.eval_samples or run.samples
    asked = Counter(key for lines in source.values() for key in {_question(line) for line in lines})
    for question, count in asked.most_common(QUESTIONS):
        if count < 2:
            return
        answers = {
            step: next(line for line in source[step] if _question(line) == question)
            for step in sorted(source)
            if any(_question(line) == question for line in source[step])
        }
        for step in dict.fromkeys([*evenly_spaced([*answers], TIMES - 1), max(answers)]):
            yield _answer("same question", step, answers[step])


def _question(line: Line) -> tuple[str, str]:
    return str(line.get("set", "")), str(line.get("prompt_index"))


def _answer(why: str, step: int, line: Line) -> Answer:
    reward = line.get("reward")
    correct = line.get("is_correct")
    turns = [Turn(_role(message), shortened(_text(message))) for message in line.get("messages") or ()]
    facts = [
        str(line.get("state") or ""),
        f"reward {reward:g}" if isinstance(reward, int | float) else "",
        "" if correct is None else "right" if correct else "wrong",
        f"{line.get('tokens', '?')} tokens",
        "truncated" if line.get("truncated") and not line.get("state") else "",
        str(line.get("error") or ""),
    ]
    texts = {key: shortened(str(line.get(key) or "")) for key in ("prompt", "expected", "response")}
    return Answer(why, step, **texts, facts=", ".join(filter(None, facts)), turns=turns)


def _role(message: Mapping[str, Any]) -> str:
    is_policy = message.get("role") == "assistant"
    label = "policy, trained on" if is_policy else f"{message.get('name') or message.get('role')}, given"
    return f"{message['of']}: {label}" if message.get("of") else label


def _text(message: Mapping[str, Any]) -> str:
    """Return the content of a message and its tool calls."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return "\n".join(
        [str(message.get("content") or ""), *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]
    )


def shortened(text: str) -> str:
    """Shorten a text to its first and last CHARACTERS / 2 characters."""
    text = encodable(text)
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
