"""What the metrics of a run warn of, for `grpo-mp watch` and `grpo-mp doctor run`. Pure."""

import math
from collections.abc import Mapping, Sequence
from functools import cache

from grpo_mp.findings import Finding, Level
from grpo_mp.monitor.metrics import TABLE, Metric, find_metric

MetricLine = Mapping[str, float | None]  # of metrics.jsonl
LAST_STEPS = 20  # in which a metric outside its range is still news


def run_warnings(lines: Sequence[MetricLine]) -> list[Finding]:
    """Return a warning for each metric that is outside its healthy range, those first that were so at most steps."""
    unhealthy: dict[str, int] = {}
    for line in lines:
        for name in filter(_row, line):
            unhealthy[name] = unhealthy.get(name, 0) + (not _is_healthy(name, line[name]))
    last = {name: line for line in lines[-LAST_STEPS:] for name in line}
    names = [name for name in unhealthy if name in last and not _is_healthy(name, last[name][name])]
    return [_warning(name, last[name]) for name in sorted(names, key=lambda name: (-unhealthy[name], name))]


@cache
def _row(name: str) -> Metric | None:
    """Return the metric's row; None of what is none, such as the step, or is of another version."""
    return next((metric for metric in sorted(TABLE, key=lambda row: row.is_pattern) if metric.matches(name)), None)


def _is_healthy(name: str, value: float | None) -> bool:
    metric = _row(name)
    return metric is None or metric.is_healthy(math.nan if value is None else value)


def _warning(name: str, line: MetricLine) -> Finding:
    metric, value = find_metric(name, "scalar"), line[name]
    shown = "no number" if value is None else f"{value:.4g}"
    sentence = f"{name} is {shown} at step {line['step']} (healthy: {metric.healthy})"
    return Finding(Level.WARNING, sentence, [metric.meaning], metric.action)
