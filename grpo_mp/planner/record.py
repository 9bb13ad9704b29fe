"""A plan as JSON, for the report of a run."""

from pathlib import Path
from typing import Any

from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.errors import UserError
from grpo_mp.files import write_json
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.memory import SubPhase, total_bytes
from grpo_mp.planner.plan import Plan, check_fits, make_plan

# The planner's parts of a phase of a run, which counts them as one.
PHASES = {
    "generate": (SubPhase.GENERATE,),
    "score": (SubPhase.SCORE,),
    "logprob": (SubPhase.LOGPROB,),
    "train": (SubPhase.TRAIN, SubPhase.OPTIMIZER),
    "sync": (SubPhase.SYNC,),
    "check": (SubPhase.CHECK,),
    "save": (SubPhase.SAVE,),
    "move": (SubPhase.OFFLOAD,),
}


def plan_record(plan: Plan, with_times: bool) -> dict[str, Any]:
    """Return layout, verdict, and of each phase the bytes of the fullest device and host, and the seconds of a step.

    Seconds are None without `with_times`.
    """
    job = plan.job
    return {
        "cluster": job.cluster.name,
        "ranks": job.world_size,
        "nodes": job.nodes,
        "engines": job.num_engines,
        "layout": describe_parallelism(job.settings.layout, job.train_ranks),
        "parameters": job.parameters,
        "verdict": check_fits(plan).sentence,
        "step_s": plan.step_s if with_times else None,
        "phases": {name: _phase(plan, parts, with_times) for name, parts in PHASES.items()},
    }


def _phase(plan: Plan, parts: tuple[SubPhase, ...], with_times: bool) -> dict[str, float | None]:
    devices = (*plan.memory.device, plan.memory.engine_device)
    seconds = sum(plan.times[part].expected_s * plan.times_per_step(part) for part in parts)
    needs = [total_bytes(one[part]) for one in devices for part in parts if part in one]
    host = plan.memory.host
    return {
        "device_bytes": max(needs, default=0.0),
        "host_bytes": max((total_bytes(host[part]) for part in parts if part in host), default=0.0),
        "seconds": seconds if with_times else None,
    }


def write_plan(job: PlannedJob, file: Path, with_times: bool) -> bool:
    """Plan a job and write the plan; return whether it fits. Raises UserError where the file's folder was removed."""
    plan = make_plan(job)
    try:
        write_json(file, plan_record(plan, with_times), make_folder=False)
    except FileNotFoundError as error:
        raise UserError(f"{file}: its folder was removed meanwhile: no plan is written") from error
    return check_fits(plan).fits
