"""Steps that somebody measured and published, beside what the planner expects of the same recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_mp.config import check_settings
from grpo_mp.planner.clusters import LARGEST, Efficiency, read_cluster
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import make_plan
from grpo_mp.planner.resource_use import ResourceUse, estimate_time
from grpo_mp.planner.sync_use import sync_use
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import read_yaml, shorten

MEASURED = Path(__file__).with_name("measured.yaml")
STEP = "step"
# Settings that no measurement depends on.
ANY_RUN: dict[str, Any] = {
    "run": {"folder": "runs/measured", "steps": 1, "save_every": 0},
    "data": {"train": "train.jsonl"},
    "reward": {"answer": 1.0},
    "optimizer": {"lr": 1e-6},
}
KINDS = {"name": str, "source": str, "fitted": bool, "cluster": str, "nodes": int, "measured": dict, "settings": dict}
COLUMNS = ("recipe", "time of", "measured s", "expected s", "error", "by fitted rates s", "error", "the fit is")
# By cluster, what tests/bench/fit_rates.py finds on the rows that are `fitted`.
FITTED = {"h100-80": Efficiency(matmul=0.35, device_memory=0.80, link=0.70)}


@dataclass(frozen=True)
class MeasuredStep:
    """A recipe on its machines, and seconds by phase, `step` for all of them."""

    name: str
    source: str
    fitted: bool
    job: PlannedJob
    measured: Mapping[str, float]

    def expected_s(self, phase: str, rates: Efficiency | None = None) -> float:
        """Return the seconds that the planner expects of a phase, or of a step.

        A step has its weight sync, not the check after it. `rates`: other achievable shares than those of the
        cluster's profile.
        """
        cluster = replace(self.job.cluster, achievable=rates or self.job.cluster.achievable)
        plan = make_plan(replace(self.job, cluster=cluster), with_sync=False)
        if phase != STEP:
            return plan.times[SubPhase(phase)].expected_s
        return plan.step_s + estimate_time(self._sync_use, cluster).expected_s

    @cached_property
    def _sync_use(self) -> ResourceUse:
        """The use of a weight sync, which no rate changes."""
        return sync_use(self.job)


def read_measured(file: Path) -> tuple[MeasuredStep, ...]:
    """Read measured steps. Raises UserError where the file is no list of them."""
    entries = read_yaml(file)
    if not isinstance(entries, list):
        raise UserError(f"{file}: expected a list of measured steps, found {type(entries).__name__}")
    return tuple(_read_step(file, entry) for entry in entries)


def compare(steps: tuple[MeasuredStep, ...]) -> list[tuple[str, ...]]:
    """Return the cells of a table, a row for each measured time."""
    return [_row(step, phase, seconds) for step in steps for phase, seconds in step.measured.items()]


def _row(step: MeasuredStep, phase: str, measured_s: float) -> tuple[str, ...]:
    def beside(rates: Efficiency | None) -> tuple[str, str]:
        expected_s = step.expected_s(phase, rates)
        return f"{expected_s:,.0f}", f"{expected_s / measured_s - 1:+.0%}"

    fitted = FITTED.get(step.job.cluster.name)
    by_fit = (*beside(fitted), _role(step)) if fitted else ("", "", "of no row of this cluster")
    return (step.name, phase, f"{measured_s:,.0f}", *beside(None), *by_fit)


def _role(step: MeasuredStep) -> str:
    return "made on it" if step.fitted else "checked by it"


def _read_step(file: Path, entry: Any) -> MeasuredStep:
    names = {"name", "source", "fitted", "cluster", "nodes", "response_tokens", "measured", "settings"}
    if not isinstance(entry, dict) or set(entry) != names:
        raise UserError(f"{file}: a measured step has {', '.join(sorted(names))}; found {entry!r:.100}: correct it")
    where = f"{file}: {shorten(str(entry['name']))}"
    for name, kinds in KINDS.items():
        if not isinstance(entry[name], kinds) or (name != "fitted" and isinstance(entry[name], bool)):
            raise UserError(f"{where}: {name}={entry[name]!r:.100} has the wrong type: correct it")
    for name, number in {
        "nodes": entry["nodes"],
        "response_tokens": entry["response_tokens"],
        **entry["measured"],
    }.items():
        if name in entry["measured"] and name not in (STEP, *SubPhase):
            raise UserError(f"{where}: {shorten(str(name))} is no phase: one of {', '.join((STEP, *SubPhase))}")
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= LARGEST:
            raise UserError(f"{where}: {name}={number!r:.100} is not a number above 0, up to {LARGEST:.0e}")
    return MeasuredStep(entry["name"], entry["source"], entry["fitted"], read_recipe(file, entry), entry["measured"])


def read_recipe(file: Path, entry: Mapping[str, Any]) -> PlannedJob:
    """Return the job of a published recipe. Raises UserError where its settings are wrong."""
    given = entry["settings"]
    values = given | {
        name: part | (given.get(name) or {}) for name, part in ANY_RUN.items() if _is_section(given.get(name))
    }
    settings = check_settings(values, f"{file}: {entry['name']}")
    hf, _ = find_config(settings.model.path)
    return make_job(settings, hf, read_cluster(entry["cluster"]), entry["nodes"], None, entry["response_tokens"])


def _is_section(value: Any) -> bool:
    """Return whether a value can be laid over a section; others are refused as settings."""
    return value is None or isinstance(value, dict)
