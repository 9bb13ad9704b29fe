"""Charts of related metrics, for the report and for TensorBoard's custom scalars."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Curve:
    """A row of curves.yaml: one chart. `metrics`: label of a line -> pattern of metric names."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    note: str = ""
    band: str = ""  # metric with the half width of the band around the line
    stacked: bool = False


CURVES: dict[str, tuple[Curve, ...]] = {
    section: tuple(Curve(**row) for row in rows)
    for section, rows in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}


def tensorboard_layout() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return the layout for SummaryWriter.add_custom_scalars: section -> title -> (chart kind, name patterns)."""
    return {
        section: {
            curve.title: ("Multiline", [f"^{pattern.replace('*', '[^/]+')}$" for pattern in curve.metrics.values()])
            for curve in curves
        }
        for section, curves in CURVES.items()
    }
