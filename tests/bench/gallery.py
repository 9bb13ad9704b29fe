"""Make the gallery of sicknesses: `python -m tests.bench.gallery`, or with NAME... make those anew.

Trains each sickness of tests/bench/sicknesses.py whose run is not there, records the metrics that rules look at in
tests/monitor/sick/NAME.jsonl, and its best answers of the first and the last step beside them; draws all that are
recorded beside the healthy run, by the report's charts; writes grpo_mp/monitor/GALLERY.md of them.
A sickness that its rule does not find is not recorded, and the exit status is 1.
About a quarter of an hour on two cores.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from grpo_mp.monitor.curves import CURVES, Curve
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.monitor.report.charts import Chart, Series
from grpo_mp.monitor.report.curves import chart_of
from grpo_mp.monitor.report.page import choose_answers
from grpo_mp.monitor.rules import RULES, MetricLine, find_warnings
from grpo_mp.monitor.run_folder import RunRecords, read_metrics, read_run
from grpo_mp.utils.findings import Finding
from tests.bench.picture import write_charts
from tests.bench.sicknesses import HEALTHY, SICKNESSES, run, show, with_names
from tools.write_pages import table

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "monitor" / "sick"
PAGE = ROOT / "grpo_mp" / "monitor" / "GALLERY.md"
PICTURES = PAGE.with_name("gallery")
ALWAYS = ("reward/mean", "rollout/accuracy", "train/entropy")  # drawn where a rule looks at fewer metrics
CHARTS = 3
CHARACTERS = 160  # of an answer
INTRODUCTION = """# Failure gallery

<!-- Written by `python -m tests.bench.gallery`. -->

Tiny runs that go wrong in a known way: the quickstart's run, smaller, with a few settings changed.
`python -m tests.bench.sicknesses NAME` repeats one in minutes on two CPU cores and prints what
[the rules](README.md#warnings) find. Pictures show one recorded run (solid) beside a healthy one (dashed).
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args = with_names(parser)
    beside = () if HEALTHY in recorded_names() else (HEALTHY,)  # what the others are drawn beside
    made = dict.fromkeys((*beside, *(args.names or SICKNESSES)))
    found = [make(name, args.out) for name in made]
    names = recorded_names()
    for name in names:
        if name in made or HEALTHY in made:
            draw(name)
    PAGE.write_text(page(names), encoding="utf-8")
    return 0 if all(found) else 1


def make(name: str, out: Path) -> bool:
    lines = run(name, out)
    if not show(name, lines):
        return False
    records = read_run(out / name)
    (RECORDED / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in recorded(lines)))
    (RECORDED / f"{name}.answers.json").write_text(json.dumps(best_answers(records), indent=1) + "\n")
    return True


def recorded(lines: Sequence[MetricLine]) -> list[MetricLine]:
    """Return of each line what rules look at, in five digits."""
    patterns = [re.compile("[^/]+".join(map(re.escape, name.split("*")))) for rule in RULES for name in rule.when]
    return [
        {
            name: float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
            for name, value in line.items()
            if name == "step" or any(pattern.fullmatch(name) for pattern in patterns)
        }
        for line in lines
    ]


def best_answers(records: RunRecords) -> list[dict[str, Any]]:
    """Return question, right answer and best answer of the first and the last step that has samples."""
    ends = {step: records.samples[step] for step in (min(records.samples), max(records.samples))}
    best = [one for one in choose_answers(replace(records, samples=ends, eval_samples={})) if one.why == "best"]
    texts = ("prompt", "expected", "response")
    return [{"step": one.step} | {name: printable(getattr(one, name)[:CHARACTERS]) for name in texts} for one in best]


def printable(text: str) -> str:
    """Return a model's text without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)


def read_recorded(name: str) -> RunRecords:
    return RunRecords(name, {}, read_metrics(RECORDED / f"{name}.jsonl"), {}, {})


def warnings_of(name: str) -> tuple[Finding, ...]:
    """Return what the rules find in a recorded run, what it is there for first."""
    found = find_warnings(read_recorded(name).metrics)
    return tuple(sorted(found, key=lambda one: one.rule != SICKNESSES[name].rule))


def draw(name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    write_charts(charts_of(name), PICTURES / f"{name}.svg")


def charts_of(name: str) -> list[Chart]:
    runs = [read_recorded(one) for one in dict.fromkeys((HEALTHY, name))]
    return [_chart(metric, runs) for metric in metrics_of(name)]


def metrics_of(name: str) -> list[str]:
    """Return the metrics that show a sickness: that in which its rule found it, others of this rule, and usual ones."""
    found = [one for one in warnings_of(name) if one.rule == SICKNESSES[name].rule]
    rules = [rule for rule in RULES if rule.name == SICKNESSES[name].rule]
    looked_at = [metric for rule in rules for metric in list(rule.when)[1:]]
    return list(dict.fromkeys([*(one.metric for one in found[:1]), *looked_at, *ALWAYS]))[:CHARTS]


def _chart(metric: str, runs: Sequence[RunRecords]) -> Chart:
    curve = _curve(metric)
    lines = []
    for place, one in enumerate(runs):
        drawn = chart_of(curve, one).series or (Series(one.name, (), ()),)
        lines.append(replace(drawn[0], name=one.name, style=1 - place))
    return Chart(metric, curve.unit, tuple(lines))


def _curve(metric: str) -> Curve:
    known = (curve for curves in CURVES.values() for curve in curves)
    fitting = [one for one in known if any(fnmatchcase(metric, pattern) for pattern in one.metrics.values())]
    described = find_metric(metric, "scalar")
    usual = fitting[0] if fitting else Curve(metric, described.unit, {})
    return replace(usual, metrics={"": metric}, band="", stacked=False)


def recorded_names() -> list[str]:
    return [name for name in SICKNESSES if (RECORDED / f"{name}.answers.json").exists()]


def page(names: Sequence[str]) -> str:
    weights = {rule.name: str(rule.weight) for rule in RULES}
    rows = [(f"[`{name}`](#{name})", _rule(name), weights.get(rule_of(name), ""), cause_of(name)) for name in names]
    runs = table(("run", "warning", "weight", "what is wrong"), rows)
    return f"{INTRODUCTION}\n{runs}\n" + "\n".join(map(_section, names))


def rule_of(name: str) -> str:
    return SICKNESSES[name].rule or ""


def cause_of(name: str) -> str:
    return SICKNESSES[name].cause.split(". ")[0].rstrip(".") + "."


def _rule(name: str) -> str:
    return f"`{SICKNESSES[name].rule}`" if SICKNESSES[name].rule else "none"


def _section(name: str) -> str:
    metrics = ", ".join(chart.title for chart in charts_of(name))
    return f"## {name}\n\n![{metrics}](gallery/{name}.svg)\n"


if __name__ == "__main__":
    sys.exit(main())
