"""The page of the metrics: the dictionary, one table for each group of names."""

from grpo_mp.monitor.metrics import TABLE, Metric
from grpo_mp.pages.markdown import fill, table

HEAD = ("name", "unit", "meaning", "healthy", "what to do", "known as")


def page() -> str:
    """Return the page as Markdown."""
    groups = dict.fromkeys(metric.group for metric in TABLE)
    tables = (
        f"### {group}/\n\n{table(HEAD, [_cells(metric) for metric in TABLE if metric.group == group])}"
        for group in groups
    )
    return fill("monitor", metrics="\n".join(tables))


def _cells(metric: Metric) -> tuple[str, ...]:
    unit = metric.unit if metric.kind == "scalar" else f"{metric.unit} ({metric.kind})"
    return f"`{metric.name}`", unit, metric.meaning, metric.healthy, metric.action, metric.known_as
