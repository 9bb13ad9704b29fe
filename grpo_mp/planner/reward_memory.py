"""What servers of reward models and of a teacher that the job starts keep on each device in SCORE, and on the host."""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import PlannedJob
from grpo_mp.rewards.teacher import SECTION
from grpo_mp.rollout.engine_parallelism import read_argument
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.section import ServedModelConfig

WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class RewardMemory:
    """Bytes of some models together on one GPU. While they sleep, `weights` are on the host."""

    servers: int  # that have a process on each GPU
    weights: float
    kv_cache: float  # what mem_fraction_static leaves beside the weights


def reward_memory(job: PlannedJob) -> RewardMemory:
    """Sum over the reward models of the settings. Raises UserError where a folder has no weights."""
    models = {f"reward.{name}": model for name, model in job.settings.reward.own_models.items()}
    return _memory(job, models)


def teacher_memory(job: PlannedJob) -> RewardMemory:
    """Return that of the teacher of the settings, if the job serves it. Raises UserError for no weights."""
    distillation = job.settings.algorithm.distillation
    own = distillation is not None and distillation.teacher.folder is not None
    return _memory(job, {SECTION: distillation.teacher} if distillation and own else {})


def _memory(job: PlannedJob, models: Mapping[str, ServedModelConfig]) -> RewardMemory:
    sizes = [(weight_bytes(section, model), model) for section, model in models.items()]
    caches = (
        max(
            0.0,
            read_argument(model.args, "mem_fraction_static", OVERHEADS.mem_fraction_static) * job.cluster.gpu_bytes
            - size,
        )
        for size, model in sizes
    )
    return RewardMemory(len(models), sum(size for size, _ in sizes), sum(caches))


def weight_bytes(section: str, model: ServedModelConfig) -> float:
    """Return the bytes of the files' weights that one GPU of a server has."""
    assert model.folder
    kinds = (sum(file.stat().st_size for file in model.folder.glob(pattern)) for pattern in WEIGHT_FILES)
    size = next((size for size in kinds if size), 0)
    if not size:
        raise UserError(f"{section}.folder={model.folder}: it has no weights ({', '.join(WEIGHT_FILES)})")
    return size / model.gpus_per_server
