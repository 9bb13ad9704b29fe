"""Offload and onload policy, critic, engine and reward servers when a phase begins; not used on a CPU."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.nccl_memory import NcclMemory, can_suspend
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.offload import PolicyOffloader
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.trainer.phase_manager import OffloadFunction
from grpo_mp.utils.errors import EngineError
from grpo_mp.utils.phases import TRAINER

HINT = "where it ran out of device memory, lower engine.args.mem_fraction_static"
ENGINE_TAGS = {"engine_weights": ("weights",), "engine_cache": ("kv_cache", "cuda_graph")}
MEMORY_TIMEOUT_S = 600.0  # wait for device memory that other processes free
INITIAL_RESIDENCY = replace(TRAINER, gradients=True, optimizer=True)


def start_engines_first(rollout: Rollout, group: dist.ProcessGroup) -> None:
    """Wait for engines, then for reward servers, and offload each: both size their memory by what is free."""
    rollout.wait_ready()
    for sleep_or_wake in engine_functions(rollout, group).values():
        sleep_or_wake(False)
    rollout.open_reward_servers(group, sleeps=True)


def offload_functions(
    policy: Policy,
    rollout: Rollout,
    optimizer_moves: bool,
    communicators: NcclMemory | None,
    critic: Critic | None = None,
) -> dict[str, OffloadFunction]:
    """Return, by field of Residency, the functions that move the item; they wait up to MEMORY_TIMEOUT_S for memory.

    `optimizer_moves`: whether the optimizer state moves; `communicators`: None if the NCCL buffers stay on the device;
    `critic`: moves with the policy.
    """
    offloader = PolicyOffloader(policy, MEMORY_TIMEOUT_S, communicators)
    offloaders = [offloader, PolicyOffloader(critic, MEMORY_TIMEOUT_S)] if critic else [offloader]
    group = policy.parallel.job.group
    return {
        "communicators": partial(_move_communicators, offloader, group) if communicators else _stay,
        **{part: partial(_move_models, offloaders, part) for part in ("policy_weights", "gradients")},
        "optimizer": partial(_move_models, offloaders, "optimizer") if optimizer_moves else _stay,
        **engine_functions(rollout, group),
        "reward_model": partial(_move_reward_servers, rollout, group),
    }


def engine_functions(rollout: Rollout, group: dist.ProcessGroup) -> dict[str, OffloadFunction]:
    """Return the offload functions of this rank's engine by field of Residency; an engine that fails is lost."""
    return {part: partial(_move_engine, rollout, group, tags) for part, tags in ENGINE_TAGS.items()}


def nccl_memory(layout: LayoutConfig) -> NcclMemory | None:
    """Return the NCCL buffers of the layout's communicators; None if the installed NCCL cannot free them."""
    return NcclMemory(layout) if can_suspend(torch.cuda.nccl.version(), os.environ) else None


def _move_communicators(offloader: PolicyOffloader, group: dist.ProcessGroup, onload: bool) -> None:
    platform.synchronize()  # no communicator may be in use
    dist.barrier(group=group)  # this barrier has a time limit; NCCL has none
    offloader.move("communicators", onload)


def _move_models(offloaders: Sequence[PolicyOffloader], part: str, onload: bool) -> None:
    for offloader in offloaders:
        offloader.move(part, onload)


def _stay(onload: bool) -> None:
    """Move nothing."""


def _move_engine(rollout: Rollout, group: dist.ProcessGroup, tags: tuple[str, ...], onload: bool) -> None:
    if onload:  # an engine takes memory on the devices of all its ranks, which must have freed theirs
        dist.barrier(group=group)
    with rollout.losing_engine() as client:
        if client:
            try:
                rollout.call((client.resume_memory if onload else client.release_memory)(tags))
            except EngineError as error:
                raise EngineError(f"{error}: {HINT}") from error
    dist.barrier(group=group)


def _move_reward_servers(rollout: Rollout, group: dist.ProcessGroup, onload: bool) -> None:
    if not rollout.reward_servers:
        return
    if onload:  # a server takes memory on the devices of all its ranks
        dist.barrier(group=group)
    rollout.reward_servers.move(onload)
    dist.barrier(group=group)
