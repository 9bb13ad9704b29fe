"""The cost of failures of a planned and simulated job, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import Plan, save_uses
from grpo_mp.planner.resource_use import estimate_time
from grpo_mp.simulation.failing_engines import with_engine_failures
from grpo_mp.simulation.failures import FailureCost, UnreliableJob, compare_save_every
from grpo_mp.simulation.loop import simulate
from grpo_mp.simulation.scenario import Outcome

HOUR_S = 3600.0
# Of all failures of an H200 cluster in four months 41.5 % took another host for a GPU, 19.5 % a reset (Crusoe, GTC 25).
GPU_REPAIRED = 0.68
DEFAULT_SAVE_EVERY = 20  # where a job saves at its end only
LEAST_STEPS, LEAST_FAILURES = 2_000, 10_000  # of those that end the job: a share of its time is known to 2 % of itself
COLUMNS = (
    "save every",
    "effective training time",
    "engines",
    "saves",
    "repeated",
    "restarts",
    "waiting for a host",
    "failures a day",
)


@dataclass(frozen=True)
class FailureAssumptions:
    """Mean hours between failures: of a GPU, of a host for other reasons, and of a host's network; 0: none fails.

    `restart_s`: from a failure until the started job reads its checkpoint; `repair_h`: mean hours until a host is back
    that failed, or whose GPU did; `gpu_repaired`: the share of failures of GPUs after which it has to be away, where
    the others end with a reset.
    """

    gpu_mtbf_h: float = 0.0
    host_mtbf_h: float = 0.0
    network_mtbf_h: float = 0.0
    restart_s: float = 300.0
    spares: int = 0
    repair_h: float = 24.0
    gpu_repaired: float = GPU_REPAIRED
    seed: int = 0

    @property
    def any(self) -> bool:
        """Return whether a job ends by any of them."""
        return bool(self.gpu_mtbf_h or self.host_mtbf_h or self.network_mtbf_h)

    @property
    def repaired(self) -> dict[str, float]:
        """Return the share of failures after which a host is away, by kind."""
        return {"gpu": self.gpu_repaired, "host": 1.0}

    def mtbf_s(self, gpus: int, hosts: int) -> dict[str, float]:
        """Return the mean seconds between failures of a job, by kind."""
        units = {
            "gpu": (self.gpu_mtbf_h, gpus),
            "host": (self.host_mtbf_h, hosts),
            "network": (self.network_mtbf_h, hosts),
        }
        return {kind: hours * HOUR_S / count for kind, (hours, count) in units.items() if hours}


def without_failures(outcome: Outcome) -> Outcome:
    """Simulate the same run again: no engine fails, and no checkpoint is written."""
    rates = replace(outcome.scenario.rates, save_s=0.0)
    return simulate(replace(outcome.scenario, rates=rates, engine_mtbf_s=0.0))


def unreliable_job(plan: Plan, undisturbed: Outcome, assumed: FailureAssumptions, slower: float = 1.0) -> UnreliableJob:
    """Return a planned job whose steps last as simulated. `plan`: on the same GPUs.

    `slower`: how many times longer a step lasts where engines fail, as a part of its generation. A killed job loses its
    responses in flight, each half done in the mean, or less where it began a group before.
    """
    job, scenario = plan.job, undisturbed.scenario
    train_s = min(scenario.step_train_s, undisturbed.step_s)
    batch = min(scenario.slots, scenario.groups_in_flight * scenario.group_size)
    context = scenario.prompt_tokens + max(scenario.lengths) / 2
    token_s = scenario.rates.decode_s(batch, batch * context) / scenario.acceptance_length
    weights, rest = (estimate_time(use, job.cluster).expected_s for use in save_uses(job))
    blocking_s = plan.times[SubPhase.SAVE].expected_s
    return UnreliableJob(
        generate_s=undisturbed.step_s * slower - train_s,
        train_s=train_s,
        in_flight_s=fmean(scenario.lengths) / 2 * token_s,
        save_s=blocking_s,
        write_s=max(0.0, weights + rest - blocking_s),
        restart_s=assumed.restart_s + plan.times[SubPhase.LOAD].expected_s + scenario.rates.sync_s,
        mtbf_s=assumed.mtbf_s(scenario.gpus, -(-scenario.gpus // job.gpus_per_node)),
        repaired=assumed.repaired,
        spares=assumed.spares,
        repair_s=assumed.repair_h * HOUR_S,
        save_every=job.settings.run.save_every or DEFAULT_SAVE_EVERY,
        steps=LEAST_STEPS,
        least_failures=LEAST_FAILURES,
        seed=assumed.seed,
    )


def failure_costs(plan: Plan, outcome: Outcome, assumed: FailureAssumptions) -> tuple[list[FailureCost], float]:
    """Return what failures cost by the steps between checkpoints, and how much longer those of engines make a step.

    The costs are of a job whose steps last that much longer: their useful time holds what its engines cost.
    """
    undisturbed = without_failures(outcome)
    disturbed = with_engine_failures(undisturbed, outcome.scenario.engine_mtbf_s)
    slower = max(1.0, disturbed.step_s / undisturbed.step_s)
    return compare_save_every(unreliable_job(plan, undisturbed, assumed, slower)), slower


def row_of(cost: FailureCost, slower: float) -> tuple[str, ...]:
    """Return the cells of a run, whose shares are all of its time; `slower`: how much longer engines make a step.

    Where they fail, a part of the time in which steps are done is theirs; hosts fail, and are away, by the clock.
    """
    lost = {kind: seconds / cost.total_s for kind, seconds in cost.lost.items()}
    return (
        f"{cost.job.save_every}",
        f"{cost.effective_share / slower:.1%}",
        f"{cost.effective_share * (1 - 1 / slower):.1%}",
        *(f"{lost.get(kind, 0.0):.1%}" for kind in ("saves", "repeated", "restarts", "waiting for a host")),
        f"{cost.failures.total() / cost.total_s * 24 * HOUR_S:.2g}",
    )


def describe_best(costs: Sequence[FailureCost], slower: float) -> str:
    """Return a sentence: how often to save."""
    best = max(costs, key=lambda cost: cost.effective_share)
    return (
        f"run.save_every={best.job.save_every} trains most of the time: {best.effective_share / slower:.1%}. A "
        f"checkpoint takes {best.job.save_s:,.1f} s and is whole {best.job.write_s:,.0f} s later; a failure costs "
        f"{best.job.restart_s:,.0f} s and {best.job.train_s:,.0f} of {best.job.step_s:,.0f} s for each step since then."
    )
