"""Make settings and jobs for tests of the planner."""

from typing import Any

from grpo_mp.config import Settings, check_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.model_configs import published_config
from tests.minimal_settings import MINIMAL_SETTINGS

BASE: dict[str, Any] = MINIMAL_SETTINGS | {
    "rollout": {"prompts_per_step": 128, "group_size": 8, "max_prompt_tokens": 1024, "max_response_tokens": 3072},
    "training": {"max_tokens_per_microbatch": 4096},
}


def settings_of(schedule: str = "colocated", **sections: dict[str, Any]) -> Settings:
    """Override values in sections of the base settings."""
    changed = {name: BASE.get(name, {}) | values for name, values in sections.items()}
    return check_settings(BASE | {"schedule": schedule} | changed, "test")


def job_of(name: str, cluster: str, nodes: int, schedule: str = "colocated", **sections: dict[str, Any]) -> PlannedJob:
    """Put a published model on machines of a shipped profile."""
    return make_job(settings_of(schedule, **sections), published_config(name), read_cluster(cluster), nodes)
