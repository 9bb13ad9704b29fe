"""Who moves what when a phase begins. On a CPU nothing moves: host and device are one."""

from functools import partial

import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.config import Settings
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.residency import PolicyResidency
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.scheduler.phases import Residency
from grpo_mp.scheduler.scheduler import Mover

ENGINE_TAGS = {"engine_weights": ("weights",), "engine_cache": ("kv_cache", "cuda_graph")}
EVERYTHING = Residency(True, True, True, True, True)


def device_movers(settings: Settings, policy: Policy, rollout: Rollout) -> dict[str, Mover]:
    """Movers by field of Residency; empty where nothing moves.

    Full-precision policies stay: their optimizer works on views of the model's own weights.
    """
    if not platform.on_cuda() or settings.model.dtype != "bfloat16":
        return {}
    residency = PolicyResidency(policy, settings.sync.timeout_s)

    def move_engine(tags: tuple[str, ...], wake: bool) -> None:
        if rollout.client:
            call = rollout.client.resume_memory if wake else rollout.client.release_memory
            rollout.call(call(tags))
        dist.barrier(group=policy.parallel.host)

    parts = ("policy_weights", "gradients", "optimizer")
    return {
        **{part: partial(residency.move, part) for part in parts},
        **{name: partial(move_engine, tags) for name, tags in ENGINE_TAGS.items()},
    }
