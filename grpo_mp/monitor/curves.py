"""Charts of metrics that belong together: of the report, and of TensorBoard's custom scalars."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Curve:
    """A row of curves.yaml: a chart of the metrics whose names match the patterns in `metrics`, by label."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    note: str = ""
    band: str = ""  # metric of a half width
    stacked: bool = False


CURVES: dict[str, tuple[Curve, ...]] = {
    section: tuple(Curve(**row) for row in rows)
    for section, rows in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}


def tensorboard_layout() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return the charts by section for TensorBoard's custom scalars: kind, and regular expressions of names."""
    return {
        section: {
            curve.title: ("Multiline", [f"^{pattern.replace('*', '[^/]+')}$" for pattern in curve.metrics.values()])
            for curve in curves
        }
        for section, curves in CURVES.items()
    }
