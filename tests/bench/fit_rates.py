"""Fit the achievable shares of a cluster's peaks on measured steps: `python -m tests.bench.fit_rates`

Each share is varied over a grid; the fit has the least sum of squared logarithms of expected / measured. Printed are
the best shares and the errors of all rows, those of the other half included, beside the shares that the profile has.
"""

from itertools import product
from math import exp, log, sqrt

from grpo_mp.planner.clusters import Efficiency
from grpo_mp.planner.measured import MEASURED, STEP, MeasuredStep, read_measured

MATMUL = [0.05 * number for number in range(4, 11)]
DEVICE_MEMORY = [0.05 * number for number in range(6, 19)]


def log_error(step: MeasuredStep, rates: Efficiency) -> float:
    """Return the logarithm of the expected over the measured seconds of a step, or of the one phase that is known."""
    phase = STEP if STEP in step.measured else next(iter(step.measured))
    return log(step.expected_s(phase, rates) / step.measured[phase])


def fit(steps: list[MeasuredStep], link: float) -> Efficiency:
    """Return the shares with the least error."""
    candidates = [Efficiency(matmul, memory, link) for matmul, memory in product(MATMUL, DEVICE_MEMORY)]
    return min(candidates, key=lambda rates: sum(log_error(step, rates) ** 2 for step in steps))


def main() -> None:
    """Print the fit for each cluster that has rows to fit on."""
    steps = read_measured(MEASURED)
    for name in sorted({step.job.cluster.name for step in steps if step.fitted}):
        rows = [step for step in steps if step.job.cluster.name == name]
        shipped = rows[0].job.cluster.achievable
        fitted = fit([step for step in rows if step.fitted], shipped.link)
        print(f"{name}: fitted {fitted}; the profile has {shipped}")
        for role in (True, False):
            part = [step for step in rows if step.fitted == role]
            for rates, word in ((fitted, "fitted"), (shipped, "profile")):
                errors = [log_error(step, rates) for step in part]
                rows_text = ", ".join(
                    f"{step.name} {exp(error) - 1:+.0%}" for step, error in zip(part, errors, strict=True)
                )
                typical = exp(sqrt(sum(error**2 for error in errors) / len(errors)))
                print(f"  {'fitted on' if role else 'checked by'}, {word} rates: {rows_text}; typically x{typical:.2f}")


if __name__ == "__main__":
    main()
