"""The settings of a sampling, from those of a training run."""

from grpo_mp.algorithms.settings import KLConfig
from grpo_mp.config import Settings


def sampling_settings(settings: Settings) -> Settings:
    """Return the settings with which `grpo-mp sample` answers the prompts of a run."""
    deterministic = {"ranks": 0, "deterministic": settings.sample.deterministic}
    updates = {
        "data": settings.data.model_copy(update={"eval": {}}),
        "rollout": settings.rollout.model_copy(update={"max_staleness": 0}),
        # All ranks have engines.
        "schedule": "colocated",
        "engine": settings.engine.model_copy(update=deterministic),
        # Nothing is trained: no reference, no critic, no experts to replay.
        "critic": None,
        "algorithm": settings.algorithm.model_copy(update={"kl": KLConfig()}),
        "training": settings.training.model_copy(update={"router_replay": "none"}),
    }
    return settings.model_copy(update=updates)
