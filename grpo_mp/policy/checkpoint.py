"""Weights and optimizer in Megatron's torch_dist format, which any other layout loads."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mp.checkpoint.safe_metadata import restrict_unpickling
from grpo_mp.errors import UserError
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.reference import Reference
from grpo_mp.policy.te_adam import as_remainders, keeps_remainders, state_in_place

# Fully reshardable: the distributed optimizer's shards are saved by parameter, not by rank.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,  # gathered on the first of the replicas alone
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save_policy(policy: Policy, folder: Path) -> None:
    """Write weights, optimizer and learning-rate step into an empty, existing folder.

    Every rank must call this.
    """
    state = _state(policy, loading=False)
    _divide(state)
    _drop_absent(state["optimizer"])
    dist_checkpointing.save(state, str(folder))


def load_policy(policy: Policy, folder: Path) -> None:
    """Read what `save_policy` wrote, from any layout. Every rank must call this.

    Raises UserError where the checkpoint is torn or belongs to another model.
    """
    state = _read(_state(policy, loading=True), folder)
    saved, wanted = state.get("main_weights", "whole"), _kept_as(policy)
    if saved != wanted:
        raise UserError(
            f"{folder}: the checkpoint holds main weights as {saved}, optimizer.megatron asks for {wanted}: set "
            "use_precision_aware_optimizer and store_param_remainders as they were"
        )
    _put(policy, state)
    with state_in_place(policy.optimizer.chained_optimizers):
        policy.optimizer.load_state_dict(_for_optimizers(policy, state["optimizer"]))
    policy.schedule.load_state_dict(state["schedule"])


def save_reference(policy: Policy, folder: Path) -> None:
    """Write the reference's weights into an empty, existing folder. Every rank must call this."""
    with _reference_of(policy).on_device():
        dist_checkpointing.save(_weights(policy), str(folder))


def load_reference(policy: Policy, folder: Path) -> None:
    """Read what `save_reference` wrote, from any layout. Every rank must call this; raises as `load_policy`."""
    with _reference_of(policy).on_device():
        _put(policy, _read(_weights(policy), folder))


def _divide(state: dict[str, Any]) -> None:
    """Give every optimizer tensor memory of its own, and the gathered whole back, one whole at a time.

    Megatron's writer would copy all of them while the wholes that they are views of are still there.
    """
    apply_factories(state)
    found = [tensor for tensor in nested_values(state["optimizer"]) if _is_view(tensor)]
    for tensor in sorted(found, key=lambda one: one.data.untyped_storage().data_ptr()):
        tensor.data = tensor.data.clone()


def _drop_absent(optimizer: dict[Any, Any]) -> None:
    """Remove what another replica saves; Megatron would warn that ranks differ."""
    for one in (optimizer, *optimizer.values()):
        if isinstance(one, dict) and "param_state" in one and one["param_state"] is None:
            del one["param_state"]


def _is_view(tensor: Any) -> bool:
    if not isinstance(tensor, ShardedTensor) or tensor.data is None or tensor.data.device.type != "cpu":
        return False
    return tensor.data.untyped_storage().size() != tensor.data.nbytes


def _reference_of(policy: Policy) -> Reference:
    if policy.reference is None:
        raise ValueError("this policy was built without a reference")
    return policy.reference


def _read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        with restrict_unpickling(folder):
            return dict(dist_checkpointing.load(state, str(folder)))
    except (CheckpointException, CheckpointingException, OSError, KeyError, RuntimeError) as error:
        raise UserError(f"{folder}: the checkpoint cannot be read: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """One line; torch gathers the ranks' errors with their stack traces, of which the first rank's error says it."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return " ".join(str(error).split())[:300]


def _put(policy: Policy, state: dict[str, Any]) -> None:
    for name, model in zip(_names(policy), policy.models(), strict=True):
        model.load_state_dict(state[name], strict=True)


def _weights(policy: Policy) -> dict[str, Any]:
    return {
        name: model.sharded_state_dict(metadata=dict(METADATA))
        for name, model in zip(_names(policy), policy.models(), strict=True)
    }


def _state(policy: Policy, loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # Megatron adds this layout's groups to it
    state: dict[str, Any] = {
        name: model.sharded_state_dict(metadata=metadata)
        for name, model in zip(_names(policy), policy.models(), strict=True)
    }
    with state_in_place(policy.optimizer.chained_optimizers):
        state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    state["schedule"] = policy.schedule.state_dict()
    state["main_weights"] = _kept_as(policy)
    return state


def _kept_as(policy: Policy) -> str:
    """What checkpoints of this policy hold as main weights."""
    return "remainders" if keeps_remainders(policy.optimizer.chained_optimizers) else "whole"


def _names(policy: Policy) -> list[str]:
    count = len(policy.chunks)
    return ["model"] if count == 1 else [f"model{chunk}" for chunk in range(count)]


def _for_optimizers(policy: Policy, state: dict[Any, Any]) -> dict[Any, Any]:
    """Arrange a loaded optimizer state for the optimizers of this layout.

    Dense and expert parameters have optimizers of their own only where experts are divided in another way, and
    what is saved once for all ranks (steps, learning rates) stands as the saving layout had it. Both kinds learn in
    step, so every saved group serves for either.
    """
    count = len(policy.optimizer.chained_optimizers)
    places = [state, *(state[key] for key in sorted(key for key in state if isinstance(key, int)))]
    saved = [group for place in places if "optimizer" in place for group in place["optimizer"]["param_groups"]]
    groups = [group | {"is_expert_parallel": expert} for group in saved for expert in (False, True)]

    remainders = _kept_as(policy) == "remainders"

    def arrange(place: dict[Any, Any]) -> dict[str, Any]:
        held = place["param_state"]
        return {
            "optimizer": {"param_groups": groups},
            "param_state": as_remainders(held) if remainders else held,
            "param_state_sharding_type": METADATA["distrib_optim_sharding_type"],
        }

    return arrange(state) if count == 1 else {index: arrange(state[index]) for index in range(count)}
