"""Where the time of a planned step is lost: `python -m tests.bench.roofline CONFIG --cluster NAME --nodes N`.

The roofline of a phase is its useful work at the achievable rates of the cluster's profile, in which everything else is
hidden: of generation the longer of matrix products and device memory, of logprobs and training the matrix products of
each token once forward, and in training once more backward with twice the products. The rest of the plan's step is
loss, divided by its cause; roofline and losses add up to the step. Rates are those of the profile: the roofline at
peak rates is lower by `achievable`.
"""

import argparse
from pathlib import Path

from grpo_mp.config import Settings, load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import Plan, make_plan
from grpo_mp.planner.resource_use import (
    ResourceUse,
    estimate_time,
    forward_flops_per_token,
    fp8_flops_per_token,
    waiting_flops_per_token,
)

PRODUCTS = "matrix products"  # names of `estimate_time`
MEMORY = "device memory"
SHOWN = 0.01  # least loss with a row of its own, as a share of the roofline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("settings", nargs="*", help="section.key=value")
    given = parser.parse_args()
    settings = load_settings(given.config, given.settings, dtype="bfloat16")
    print(table(make_plan(read_job(settings, given.cluster, given.nodes))))


def read_job(settings: Settings, cluster: str, nodes: int) -> PlannedJob:
    hf, _ = find_config(settings.model.path)
    return make_job(settings, hf, read_cluster(cluster), nodes, None, None)


def table(plan: Plan) -> str:
    """Return the table of rooflines and losses, the largest first, as Markdown."""
    least = rooflines(plan)
    lost = losses(plan)
    least_s = sum(least.values())
    parts = {f"roofline of {name}": seconds for name, seconds in least.items()}
    parts |= sorted(((name, s) for name, s in lost.items() if s >= SHOWN * least_s), key=lambda part: -part[1])
    parts |= {"other losses": plan.step_s - sum(parts.values()), "step": plan.step_s}
    rows = [f"| {name} | {seconds:,.1f} | {seconds / least_s:.2f} |" for name, seconds in parts.items()]
    return "\n".join(["| part of a step | s | of the roofline |", "|---|---|---|", *rows])


def rooflines(plan: Plan) -> dict[str, float]:
    """Return the least seconds of each phase that computes. The devices are shared: the phases follow each other."""
    assert plan.job.settings.shares_devices, "engines with devices of their own: sides overlap"
    generation = plan.times[SubPhase.GENERATE]
    useful = {name: products_s(plan.job, flops) for name, flops in useful_flops(plan.job).items()}
    return {str(SubPhase.GENERATE): max(generation.get(PRODUCTS, 0.0), generation.get(MEMORY, 0.0)), **useful}


def useful_flops(job: PlannedJob) -> dict[str, tuple[float, float]]:
    """Return the FLOPs of a GPU in bfloat16 and in FP8 of logprobs and training, with every token computed once."""
    settings = job.settings
    forward = forward_flops_per_token(job.model, job.hf, job.attention_context)
    in_fp8 = fp8_flops_per_token(job.model, job.hf) if settings.training.fp8_format else 0.0
    tokens = settings.samples_per_step * job.mean_seq_len / job.train_ranks
    passes = settings.algorithm.needs_old_logprobs(settings.optimizer_steps_per_step) + bool(settings.algorithm.kl.coef)
    counts = {SubPhase.LOGPROB: passes, SubPhase.TRAIN: 3 * settings.training.epochs}
    return {str(name): (count * tokens * (forward - in_fp8), count * tokens * in_fp8) for name, count in counts.items()}


def products_s(job: PlannedJob, flops: tuple[float, float]) -> float:
    use = ResourceUse(flops=flops[0], fp8_flops=flops[1])
    return estimate_time(use, job.cluster).get(PRODUCTS, 0.0)


def losses(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step beyond its rooflines, by cause."""
    least = rooflines(plan)
    lost: dict[str, float] = {}
    for sub_phase, times in plan.times.items():
        if str(sub_phase) not in least:
            lost |= {str(sub_phase): seconds} if (seconds := plan.seconds(sub_phase)) else {}
            continue
        computed_s = {cause: times.get(cause, 0.0) for cause in (PRODUCTS, MEMORY)}
        if sub_phase is SubPhase.GENERATE:
            shorter = min(computed_s, key=lambda cause: computed_s[cause])
            causes = {f"{shorter} not hidden": computed_s[shorter]}
        else:
            causes = products_lost(plan.job, sub_phase) | {MEMORY: computed_s[MEMORY]}
            rest = "uneven micro-batches" + ", scores of attention again" * (sub_phase is SubPhase.TRAIN)
            causes[rest] = sum(computed_s.values()) - least[str(sub_phase)] - sum(causes.values())
        causes |= {cause: seconds for cause, seconds in times.items() if cause not in computed_s}
        lost |= {f"{sub_phase}: {cause}": seconds for cause, seconds in causes.items() if seconds}
    return lost


def products_lost(job: PlannedJob, sub_phase: SubPhase) -> dict[str, float]:
    """Return the seconds of matrix products that recomputation and the wait for the busiest experts add."""
    in_bf16, in_fp8 = useful_flops(job)[str(sub_phase)]
    recomputes = sub_phase is SubPhase.TRAIN and job.settings.training.recompute == "full"
    recomputed = (in_bf16 * recomputes / 3, in_fp8 * recomputes / 3)
    forward = forward_flops_per_token(job.model, job.hf, job.attention_context)
    computed_tokens = (in_bf16 + in_fp8 + sum(recomputed)) / forward
    waited = computed_tokens * waiting_flops_per_token(job.model, job.settings.layout)
    return {
        "forward pass again (recompute)": products_s(job, recomputed),
        "waiting for the busiest experts": products_s(job, (waited, 0.0)),
    }


if __name__ == "__main__":
    main()
