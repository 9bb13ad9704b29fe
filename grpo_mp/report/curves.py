"""Charts of metrics over the steps. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from grpo_mp.monitor.samples import evenly_spaced
from grpo_mp.phases import GIB
from grpo_mp.report.contents import Chart, Series
from grpo_mp.report.records import RunRecords

POINTS = 240  # of a line: more than a chart has pixels to tell apart on a phone


@dataclass(frozen=True)
class Curve:
    """A chart to be made: the metrics whose names match `patterns`, by label; `band`: name of a half width."""

    title: str
    unit: str
    patterns: Mapping[str, str]
    note: str = ""
    band: str = ""
    stacked: bool = False
    scale: float = 1.0


def _phases(pattern: str) -> dict[str, str]:
    return {phase: pattern.format(phase) for phase in ("generate", "score", "logprob", "train", "sync", "check")}


CURVES: dict[str, tuple[Curve, ...]] = {
    "reward": (
        Curve(
            "Reward", "reward", {"mean": "reward/mean"}, "Band: mean standard deviation in a group.", "reward/group_std"
        ),
        Curve("Reward terms", "reward", {"": "reward/term/*"}, "One that rises while the answer falls is hacked."),
        Curve("Accuracy of the rollouts", "share", {"accuracy": "rollout/accuracy"}),
        Curve("Groups without signal", "share", {"zero std": "reward/zero_std_ratio"}, "All samples score alike."),
        Curve("Solved and hopeless groups", "groups", {"all right": "rollout/solve_all", "none": "rollout/solve_none"}),
        Curve("Skipped prompts", "prompts", {"skipped": "rollout/skipped_prompts"}, "Always answered right."),
    ),
    "lengths": (
        Curve(
            "Response length",
            "tokens",
            {"right": "rollout/response_length/correct", "wrong": "rollout/response_length/incorrect"},
            "Wrong answers that grow apart are the length bias that Dr. GRPO names.",
        ),
        Curve(
            "Shortest, longest", "tokens", {"min": "rollout/response_length/min", "max": "rollout/response_length/max"}
        ),
        Curve("Samples to learn from", "tokens", {"mean": "sft/length/mean", "max": "sft/length/max"}),
        Curve("Truncated", "share", {"truncated": "rollout/truncated_ratio"}, "Cut at rollout.max_response_tokens."),
    ),
    "policy": (
        Curve(
            "Supervised loss", "nats", {"train": "sft/loss", "held out": "eval/*/loss"}, "Mean over the learned tokens."
        ),
        Curve("Entropy", "nats", {"entropy": "train/entropy"}),
        Curve("KL to the reference", "nats", {"KL": "train/kl_loss"}),
        Curve("KL of a step's updates", "nats", {"KL": "train/ppo_kl"}),
        Curve("Ratio", "ratio", {"mean": "train/ratio/mean", "max": "train/ratio/max"}),
        Curve("Clipped tokens", "share", {"low": "train/pg_clipfrac_low", "high": "train/pg_clipfrac_high"}),
        Curve("Gradient norm", "norm", {"norm": "train/grad_norm"}),
        Curve("Learning rate", "rate", {"rate": "train/lr"}),
        Curve("Engine against policy", "nats", {"mean": "mismatch/logprob_abs_diff/mean"}, "Difference of logprobs."),
        Curve("KL of engine to policy", "nats", {"KL": "mismatch/kl"}),
        Curve(
            "Weight version lag",
            "updates",
            {"mean": "rollout/weight_version_lag/mean", "max": "rollout/weight_version_lag/max"},
        ),
        Curve("Busiest expert over the mean", "ratio", {"max": "train/expert_load/max_over_mean"}),
        Curve("Experts that would differ", "share", {"differ": "mismatch/router_diff_ratio"}),
    ),
    "time": (
        Curve("Phases of a step", "s", _phases("time/{}_s"), "Slowest rank.", stacked=True),
        Curve("Idle and overhead", "share", {"idle": "time/idle_share", "overhead": "time/overhead_share"}),
        Curve("Speed", "tokens/s", {"generate": "speed/generate_tokens_per_s", "train": "speed/train_tokens_per_s"}),
    ),
    "memory": (
        Curve("Device memory, peak", "GiB", _phases("memory/{}/peak_device_bytes"), "Largest rank.", scale=1 / GIB),
        Curve(
            "Host memory",
            "GiB",
            _phases("memory/{}/host_bytes"),
            "Largest rank; rising steps are a leak.",
            scale=1 / GIB,
        ),
    ),
}


def charts_of(section: str, runs: Sequence[RunRecords]) -> tuple[Chart, ...]:
    """Make the charts of a section; those of which no run has a value, or only zeros, are left out."""
    charts = []
    for curve in CURVES[section]:
        if curve.stacked:  # of each run its own
            charts += [replace(chart_of(curve, [run]), title=_titled(curve.title, run, runs)) for run in runs]
        else:
            charts.append(chart_of(curve, runs))
    return tuple(chart for chart in charts if any(any(series.values) for series in chart.series))


def _titled(title: str, run: RunRecords, runs: Sequence[RunRecords]) -> str:
    return f"{title}, {run.name}" if len(runs) > 1 else title


def chart_of(curve: Curve, runs: Sequence[RunRecords]) -> Chart:
    """Make a chart with a line for each metric of each run."""
    series = []
    for run in runs:
        for label, name in _names(curve, run):
            lines = evenly_spaced(run.metrics, POINTS) if curve.stacked else [m for m in run.metrics if name in m]
            points = [(line["step"], line.get(name, 0.0), line.get(curve.band, 0.0)) for line in lines]
            one = _series(points, curve)
            series.append(replace(one, name=f"{run.name} {label}".strip() if len(runs) > 1 else label or name))
    return Chart(curve.title, curve.unit, tuple(series), curve.note, stacked=curve.stacked)


def _names(curve: Curve, run: RunRecords) -> list[tuple[str, str]]:
    known = {name: None for line in run.metrics for name in line}
    return [
        (label or name.rsplit("/", 1)[-1], name)
        for label, pattern in curve.patterns.items()
        for name in known
        if fnmatchcase(name, pattern)
    ]


def _series(points: Sequence[tuple[float, float, float]], curve: Curve) -> Series:
    kept = [points[index] for index in downsample([value for _, value, _ in points], POINTS)]
    steps, values, widths = zip(*kept, strict=True)
    scaled = tuple(value * curve.scale for value in values)
    if not curve.band:
        return Series("", steps, scaled)
    pairs = list(zip(values, widths, strict=True))
    return Series("", steps, scaled, tuple(v - w for v, w in pairs), tuple(v + w for v, w in pairs))


def downsample(values: Sequence[float], limit: int) -> list[int]:
    """Return at most `limit` (4 or more) ascending indices: both ends, the least and the largest of even stretches.

    All, where there are no more. So a spike of one step stays, however long the run.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    kept, stretches = {0, len(values) - 1}, (limit - 2) // 2
    for stretch in range(stretches):
        inside = range(stretch * len(values) // stretches, (stretch + 1) * len(values) // stretches)
        kept |= {min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)}
    return sorted(kept)
