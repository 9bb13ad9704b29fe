"""Parser for lines of metrics.jsonl."""

import json
from typing import Any

LARGEST = 1e300  # larger values count as not finite, because their sums and differences may overflow


def parse_metrics(content: bytes) -> dict[str, float | None] | None:
    """Return the metrics of a step by name, with None for values that are not finite, or None for an invalid line."""
    try:
        line = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or finite(line.get("step")) is None or line["step"] % 1:
        return None
    if not all(value is None or type(value) in (int, float) for value in line.values()):
        return None
    return {name: int(value) if name == "step" else finite(value) for name, value in line.items()}


def finite(value: Any) -> Any:
    """Return the value if it is a finite number of magnitude at most LARGEST, else None."""
    return value if type(value) in (int, float) and abs(value) <= LARGEST else None
