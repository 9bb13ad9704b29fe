"""Read a line of metrics.jsonl, whatever is in the file. Pure."""

import json
from typing import Any

LARGEST = 1e300  # of a value: sums and differences of larger ones are not finite
LARGEST_STEP = 2**62


def parse_metrics(content: bytes) -> dict[str, float | None] | None:
    """Return the metrics of a step by name, None for a value that is not finite; None where it is no line of a step."""
    try:
        line = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not is_step(line.get("step")):
        return None
    if not all(value is None or type(value) in (int, float) for value in line.values()):
        return None
    return {name: value if name == "step" else finite(value) for name, value in line.items()}


def is_step(value: Any) -> bool:
    """Return whether a value can be the number of a step."""
    return type(value) is int and abs(value) < LARGEST_STEP


def finite(value: Any) -> Any:
    """Return a number; None for one that is not finite or beyond LARGEST, and for what is no number."""
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        return None
    return value
