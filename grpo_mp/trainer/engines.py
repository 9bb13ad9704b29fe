"""Parts of a job that generates on one rank: its engine, started beside the building of the models, and its phases."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from grpo_mp.distributed.process_groups import WAITED_PHASES, Job
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.offload import device_items
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.hosted_engine import START_TIMEOUT_S
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.trainer.job import Monitors, Resumed, starting
from grpo_mp.trainer.offload import INITIAL_RESIDENCY, start_engines_first
from grpo_mp.trainer.phase_manager import OffloadFunction, PhaseManager
from grpo_mp.trainer.recover import EngineRecovery


@dataclass(frozen=True)
class Engines:
    """This rank's part of a job that generates. `policy`: None on ranks that only host an engine."""

    job: Job
    rollout: Rollout
    phases: PhaseManager
    monitors: Monitors
    recovery: EngineRecovery
    resumed: Resumed
    policy: Policy | None = None
    critic: Critic | None = None
    offloads: bool = False  # phases move models and engine between host and device


@contextmanager
def starting_engine(job: Job, rollout: Rollout, monitors: Monitors, engines_first: bool) -> Iterator[None]:
    """Start this rank's engine and run the body, which builds the models, beside the start or after it."""
    limit_s = START_TIMEOUT_S * (4 if rollout.reward_servers else 2)
    with starting(monitors, limit_s):
        rollout.start(job.store)
        if engines_first:
            start_engines_first(rollout, job.group)
        yield
        if not engines_first:
            rollout.wait_ready()
            rollout.open_reward_servers(job.group, sleeps=False)
        dist.barrier(group=job.group)


def make_phases(
    monitors: Monitors,
    policy: Policy | None,
    critic: Critic | None,
    limit_s: float,
    functions: Mapping[str, OffloadFunction],
) -> PhaseManager:
    """Return the phase manager. `functions`: move models and engine between host and device; empty: nothing moves."""
    return PhaseManager(
        monitors.timeline,
        monitors.watchdog,
        progress=monitors.progress,
        limit_s=limit_s * (1 if policy else WAITED_PHASES),
        offload_functions=functions,
        resident=INITIAL_RESIDENCY if functions else None,
        items=partial(device_items, *filter(None, (policy, critic))) if policy else dict,
    )
