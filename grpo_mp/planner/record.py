"""A plan as JSON, for the report of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.memory import BytesByKind, SubPhase, total_bytes
from grpo_mp.planner.plan import Feasibility, Plan, check_fits, make_plan
from grpo_mp.planner.sft import SftPlan, make_sft_plan
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_json

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


SFT_PHASES = {"train": PHASES["train"], "save": PHASES["save"]}


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return layout, verdict, and of each phase the bytes of the fullest device and host, and the seconds of a step."""
    devices = (*plan.memory.device, plan.memory.engine_device)
    seconds = {part: plan.times[part].expected_s * plan.times_per_step(part) for part in SubPhase if part in plan.times}
    return {
        **_job_record(plan.job, check_fits(plan), plan.job.num_engines),
        "step_s": plan.step_s,
        "phases": _phases(PHASES, devices, plan.memory.host, seconds),
    }


def sft_plan_record(plan: SftPlan) -> dict[str, Any]:
    """Return the same of supervised fine-tuning, which trains and saves."""
    save_every = plan.job.settings.run.save_every
    seconds = {part: plan.times[part].expected_s for part in PHASES["train"]}
    seconds[SubPhase.SAVE] = plan.times[SubPhase.SAVE].expected_s / save_every if save_every else 0.0
    return {
        **_job_record(plan.job, plan.feasibility, engines=0),
        "step_s": plan.step_s,
        "phases": _phases(SFT_PHASES, plan.device, plan.host, seconds),
    }


def _job_record(job: PlannedJob, found: Feasibility, engines: int) -> dict[str, Any]:
    return {
        "cluster": job.cluster.name,
        "ranks": job.world_size,
        "nodes": job.nodes,
        "engines": engines,
        "layout": describe_parallelism(job.settings.layout, job.train_ranks),
        "parameters": job.parameters,
        "verdict": found.sentence,
    }


def _phases(
    phases: Mapping[str, Sequence[SubPhase]],
    devices: Sequence[Mapping[SubPhase, BytesByKind]],
    host: Mapping[SubPhase, BytesByKind],
    seconds: Mapping[SubPhase, float],
) -> dict[str, dict[str, float]]:
    return {
        name: {
            "device_bytes": max(
                (total_bytes(one[part]) for one in devices for part in parts if part in one), default=0.0
            ),
            "host_bytes": max((total_bytes(host[part]) for part in parts if part in host), default=0.0),
            "seconds": sum(seconds[part] for part in parts),
        }
        for name, parts in phases.items()
    }


def write_plan(job: PlannedJob, file: Path) -> bool:
    """Plan a job and write the plan; return whether it fits. Raises UserError where the file's folder was removed."""
    plan = make_plan(job)
    _write(file, plan_record(plan))
    return check_fits(plan).fits


def write_sft_plan(job: PlannedJob, file: Path) -> bool:
    """Plan a job of `sft_job`, as `write_plan` does one of RL."""
    plan = make_sft_plan(job)
    _write(file, sft_plan_record(plan))
    return plan.feasibility.fits


def _write(file: Path, record: Mapping[str, Any]) -> None:
    try:
        write_json(file, record, make_folder=False)
    except FileNotFoundError as error:
        raise UserError(f"{file}: its folder was removed meanwhile: no plan is written") from error
