"""What servers of reward models that the job starts keep on each device in SCORE, and on the host while they sleep."""

from dataclasses import dataclass

from grpo_mp.errors import UserError
from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import PlannedJob
from grpo_mp.rewards.settings import RewardModelConfig
from grpo_mp.rollout.engine_parallelism import read_argument

WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class RewardMemory:
    """Bytes of all reward models together on one GPU. While they sleep, `weights` are on the host."""

    servers: int  # that have a process on each GPU
    weights: float
    kv_cache: float  # what mem_fraction_static leaves beside the weights


def reward_memory(job: PlannedJob) -> RewardMemory:
    """Sum over the reward models of the settings. Raises UserError where a folder has no weights."""
    models = job.settings.reward.own_models
    sizes = [(weight_bytes(name, model), model) for name, model in models.items()]
    caches = (
        max(
            0.0,
            read_argument(model.args, "mem_fraction_static", OVERHEADS.mem_fraction_static) * job.cluster.gpu_bytes
            - size,
        )
        for size, model in sizes
    )
    return RewardMemory(len(models), sum(size for size, _ in sizes), sum(caches))


def weight_bytes(name: str, model: RewardModelConfig) -> float:
    """Return the bytes of the files' weights that one GPU of a server has."""
    assert model.folder
    kinds = (sum(file.stat().st_size for file in model.folder.glob(pattern)) for pattern in WEIGHT_FILES)
    size = next((size for size in kinds if size), 0)
    if not size:
        raise UserError(f"reward.{name}.folder={model.folder}: it has no weights ({', '.join(WEIGHT_FILES)})")
    return size / model.gpus_per_server
