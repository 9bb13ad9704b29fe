"""A plan as JSON, for the report of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.planner.memory import BytesByKind, SubPhase, total_bytes
from grpo_mp.planner.plan import Plan, check_fits
from grpo_mp.utils.files import write_json

# The planner's parts of a phase of a run, which counts them together.
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
SFT_PHASES = ("train", "save")


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return layout, verdict, and of each phase the bytes of the fullest device and host, and the seconds of a step."""
    job, memory = plan.job, plan.memory

    def most(places: tuple[Mapping[SubPhase, BytesByKind], ...], parts: tuple[SubPhase, ...]) -> float:
        return max((total_bytes(sizes[part]) for sizes in places for part in parts if part in sizes), default=0.0)

    phases = {
        name: {
            "device_bytes": most((*memory.device, memory.engine_device), parts),
            "host_bytes": most((memory.host,), parts),
            "seconds": sum(map(plan.seconds, parts)),
        }
        for name, parts in PHASES.items()
        if name in SFT_PHASES or not job.trains_only
    }
    return {
        "cluster": job.cluster.name,
        "ranks": job.world_size,
        "nodes": job.nodes,
        "engines": 0 if job.trains_only else job.num_engines,
        "layout": describe_parallelism(job.settings.layout, job.train_ranks),
        "parameters": job.parameters,
        "verdict": check_fits(plan).sentence,
        "step_s": plan.step_s,
        "phases": phases,
    }


def write_plan(plan: Plan, file: Path) -> None:
    """Write a plan into an existing folder."""
    write_json(file, plan_record(plan), make_folder=False)
