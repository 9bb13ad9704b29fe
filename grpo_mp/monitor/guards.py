"""Stop a run when a metric leaves the limits in `monitor.guards`."""

import math
from collections.abc import Iterable, Mapping, Sequence

from grpo_mp.config.sections import MetricGuard
from grpo_mp.utils.errors import EarlyStopError


class MetricGuards:
    """Compares the metrics of each step with the limits in `monitor.guards`. `past`: steps before a resume."""

    def __init__(self, guards: Mapping[str, MetricGuard], past: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._guards = guards
        self._values: dict[str, list[float]] = {name: [] for name in guards}
        self._best: dict[str, float] = {}
        for values in past:
            for name in guards:
                self._violation(name, values)

    def check(self, step: int, values: Mapping[str, float | None]) -> None:
        """Raise EarlyStopError if metrics are outside their limits; the message names each of them."""
        found = {name: self._violation(name, values) for name in self._guards}
        if sentences := [f"{name} {text} (monitor.guards)" for name, text in found.items() if text]:
            raise EarlyStopError(f"step {step}: {'; '.join(sentences)}: the run stops; what was saved before is kept")

    def _violation(self, name: str, values: Mapping[str, float | None]) -> str | None:
        """Add a step's value; describe the violated limit, or return None. Steps without the metric do not count."""
        if name not in values:
            return None
        guard = self._guards[name]
        seen = self._values[name]
        value = values[name]
        seen.append(math.nan if value is None else value)
        del seen[: -guard.steps]
        if len(seen) < guard.steps:
            return None
        # fmean raises for infinities of both signs, and for finite values whose sum overflows.
        mean = sum(seen) / len(seen)
        over = f"in {guard.steps} step(s)" if guard.steps > 1 else f"({seen[-1]:.4g})"
        if math.isfinite(mean):
            self._best[name] = max(self._best.get(name, mean), mean)
        return _describe(guard, seen, self._best.get(name, mean) - mean, over)


def _describe(guard: MetricGuard, seen: Sequence[float], drop: float, over: str) -> str | None:
    low = guard.min
    high = guard.max
    if low is not None and all(not value >= low for value in seen):  # NaN counts as outside
        return f"was below {low:g} {over}"
    if high is not None and all(not value <= high for value in seen):
        return f"was above {high:g} {over}"
    if guard.max_drop is not None and not drop <= guard.max_drop:
        return f"fell by {drop:.4g} from its best mean of {guard.steps} step(s), more than {guard.max_drop:g}"
    return None
