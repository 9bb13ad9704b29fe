"""Sicknesses that two cores cannot show, as reports of them describe their metrics: healthy, onset, sick, with noise.

Each is written from what its source says of sizes and shapes; the rule that finds it must cite the source.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from grpo_mp.monitor.rules import MetricLine, RuleWatch, find_warnings

LAG = "rollout/weight_version_lag/mean"
ONSET, ONSET_STEPS, STEPS = 60, 30, 200  # from when, over how many steps it comes, steps of the run


@dataclass(frozen=True)
class Report:
    """A sickness: its rule, a word of the rule's source, metrics healthy and sick, noise as a share.

    `harmless`: values of metrics with which the same change is something else; `every`: steps between evaluations.
    """

    rule: str
    source: str
    metrics: Mapping[str, tuple[float, float]]
    noise: float = 0.05
    harmless: Mapping[str, float] | None = None
    every: int = 5


REPORTS = {
    # FP8 engines, bf16 policy: the mean factor stays near 1.01 in bf16, and passes 1.05 with FP8 at long answers.
    "fp8": Report(
        "mismatch",
        "2601.14243",
        {"mismatch/token_mult_prob_error": (1.012, 1.09), LAG: (0.0, 0.0)},
        0.003,
        {LAG: 3.0},
    ),
    "fp8_in_a_run_of_old_tokens": Report(
        "mismatch_at_sync", "verl docs/fp8", {"sync/check/logprob_abs_diff/mean": (0.015, 0.08), LAG: (3.0, 3.0)}
    ),
    # A tenth of the experts differ in bf16; with another precision of the router a fifth and more.
    "routing": Report("routing_mismatch", "2510.11370", {"mismatch/router_diff_ratio": (0.09, 0.2)}),
    # Without balancing the busiest expert of a layer takes several times its share.
    "expert_collapse": Report("expert_collapse", "2408.15664", {"train/expert_load/max_over_mean": (2.2, 7.5)}),
    "clip_share": Report("clip_share", "1707.06347", {"train/pg_clipfrac": (0.04, 0.4), "train/ppo_kl": (0.01, 0.05)}),
    "effective_sample_size": Report("effective_sample_size", "2510.01161", {"train/ess": (0.94, 0.5)}),
    # One engine of a job decodes at half speed from some step on: a clock that is held down.
    "slow_engine": Report("slow_engine", "2512.22492", {"speed/slowest_engine_ratio": (0.9, 0.45)}),
    "slow_rank": Report("slow_rank", "2512.22492", {"time/slowest_rank_ratio": (1.05, 1.9)}),
    # Proxy reward up, gold down: the curves of overoptimization cross; 500 problems.
    "reward_hacking": Report(
        "reward_hacking",
        "2210.10760",
        {
            "eval/math/accuracy": (0.62, 0.45),
            "eval/math/accuracy_se": (0.022, 0.022),
            "reward/mean": (0.6, 0.85),
            "rollout/accuracy": (0.6, 0.58),
        },
        0.02,
        {"reward/mean": 0.6},  # what falls alone is no hacking
    ),
    "hacking_a_judge": Report(
        "reward_term_falls", "2209.13085", {"reward/term/harmless": (0.9, 0.55), "reward/mean": (1.1, 1.7)}, 0.03
    ),
}


def run(report: Report, is_sick: bool = True, changed: Mapping[str, float] | None = None) -> Iterator[MetricLine]:
    """Yield the steps of a run."""
    drawn = random.Random(7)
    for step in range(1, STEPS + 1):
        part = min(1.0, max(0.0, (step - ONSET) / ONSET_STEPS)) if is_sick else 0.0
        line: dict[str, float | None] = {"step": step}
        for name, (healthy, sick) in report.metrics.items():
            noise = 1 + drawn.gauss(0, report.noise)
            if not name.startswith("eval/") or step % report.every == 0:
                line[name] = (healthy + part * (sick - healthy)) * noise
        yield line | {name: value for name, value in (changed or {}).items() if name in line}


@pytest.mark.parametrize("name", REPORTS)
def test_it_is_found_when_it_comes_and_said_once(name: str) -> None:
    report, watch = REPORTS[name], RuleWatch()
    said = [found for line in run(report) for found in watch.step(line) if found.rule == report.rule]
    assert len(said) == 1
    assert ONSET < said[0].first_step < ONSET + ONSET_STEPS + 40
    assert report.source in said[0].evidence[1]


@pytest.mark.parametrize("name", REPORTS)
def test_a_healthy_run_with_the_same_noise_is_silent(name: str) -> None:
    assert find_warnings(run(REPORTS[name], is_sick=False)) == ()


@pytest.mark.parametrize("name", [name for name, report in REPORTS.items() if report.harmless])
def test_what_explains_it_silences_it(name: str) -> None:
    report = REPORTS[name]
    assert report.rule not in {found.rule for found in find_warnings(run(report, changed=report.harmless))}
