"""Weights and optimizer in Megatron's torch_dist format, which any other layout loads."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException

from grpo_mp.errors import UserError
from grpo_mp.policy.policy import Policy

# Fully reshardable: the distributed optimizer's shards are saved by parameter, not by rank.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save_policy(policy: Policy, folder: Path) -> None:
    """Write weights, optimizer and learning-rate step into an empty, existing folder.

    Every rank must call this.
    """
    dist_checkpointing.save(_state(policy, loading=False), str(folder))


def load_policy(policy: Policy, folder: Path) -> None:
    """Read what `save_policy` wrote, from any layout. Every rank must call this.

    Raises UserError where the checkpoint is torn or belongs to another model.
    """
    try:
        state = dist_checkpointing.load(_state(policy, loading=True), str(folder))
    except (CheckpointingException, OSError, KeyError, RuntimeError) as error:
        raise UserError(f"{folder}: the checkpoint cannot be read: {' '.join(str(error).split())[:300]}") from error
    for name, model in zip(_names(policy), policy.models(), strict=True):
        model.load_state_dict(state[name], strict=True)
    policy.optimizer.load_state_dict(_merged(policy, state["optimizer"]))
    policy.schedule.load_state_dict(state["schedule"])


def _state(policy: Policy, loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # Megatron adds this layout's groups to it
    state: dict[str, Any] = {
        name: model.sharded_state_dict(metadata=metadata)
        for name, model in zip(_names(policy), policy.models(), strict=True)
    }
    state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    state["schedule"] = policy.schedule.state_dict()
    return state


def _names(policy: Policy) -> list[str]:
    count = len(policy.chunks)
    return ["model"] if count == 1 else [f"model{chunk}" for chunk in range(count)]


def _merged(policy: Policy, state: dict[Any, Any]) -> dict[Any, Any]:
    """Dense and expert parameters have optimizers of their own only where experts are divided.

    A state saved so, loaded into one optimizer, keeps the first one's numbered entry: take its fields over.
    """
    if len(policy.optimizer.chained_optimizers) > 1 or 0 not in state:
        return state
    merged = {key: value for key, value in state.items() if not isinstance(key, int)}
    return state[0] | merged
