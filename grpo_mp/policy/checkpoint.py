"""Save and load weights and optimizer in Megatron's torch_dist format, which any layout can load."""

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
from grpo_mp.policy.te_adam import as_remainders, state_dict_without_copies, stores_param_remainders

# Fully reshardable: the distributed optimizer's shards are saved by parameter, not by rank.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,  # gathered on the first replica only
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save_policy(policy: Policy, folder: Path) -> None:
    """Write weights, optimizer and learning-rate step into an empty, existing folder.

    Every rank must call this.
    """
    state = _state_dict(policy, loading=False)
    _clone_optimizer_views(state)
    optimizer = state["optimizer"]
    for part in (optimizer, *optimizer.values()):  # what another replica saves; Megatron would warn that ranks differ
        if isinstance(part, dict) and "param_state" in part and part["param_state"] is None:
            del part["param_state"]
    dist_checkpointing.save(state, str(folder))


def load_policy(policy: Policy, folder: Path) -> None:
    """Read what `save_policy` wrote, from any layout. Every rank must call this.

    Raises UserError where the checkpoint is incomplete or belongs to another model.
    """
    state = _read(_state_dict(policy, loading=True), folder)
    saved, expected = state.get("main_weights", "whole"), _main_weight_format(policy)
    if saved != expected:
        raise UserError(
            f"{folder}: the checkpoint holds main weights as {saved}, training.megatron_args asks for {expected}: set "
            "use_precision_aware_optimizer and store_param_remainders as they were"
        )
    _load_models(policy, state)
    with state_dict_without_copies(policy.optimizer.chained_optimizers):
        policy.optimizer.load_state_dict(_optimizer_states(policy, state["optimizer"]))
    policy.schedule.load_state_dict(state["schedule"])


def save_reference(policy: Policy, folder: Path) -> None:
    """Write the reference's weights into an empty, existing folder. Every rank must call this."""
    with _reference_of(policy).on_device():
        dist_checkpointing.save(_model_states(policy, dict(METADATA)), str(folder))


def load_reference(policy: Policy, folder: Path) -> None:
    """Read what `save_reference` wrote, from any layout. Every rank must call this; raises as `load_policy`."""
    with _reference_of(policy).on_device():
        _load_models(policy, _read(_model_states(policy, dict(METADATA)), folder))


def _clone_optimizer_views(state: dict[str, Any]) -> None:
    """Replace views of gathered host buffers by copies, buffer by buffer, so that each buffer is freed.

    Megatron's writer would copy all of them while the buffers still exist.
    """
    apply_factories(state)
    views = [tensor for tensor in nested_values(state["optimizer"]) if _is_view(tensor)]
    for tensor in sorted(views, key=lambda view: view.data.untyped_storage().data_ptr()):
        tensor.data = tensor.data.clone()


def _is_view(tensor: Any) -> bool:
    """Tell whether it is a host tensor in a larger storage."""
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
        raise UserError(f"{folder}: the checkpoint cannot be read: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """Return the message in one line; of torch's errors of all ranks with their stack traces, the first rank's."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return " ".join(str(error).split())[:300]


def _load_models(policy: Policy, state: dict[str, Any]) -> None:
    for name, model in zip(_model_names(policy), policy.models(), strict=True):
        model.load_state_dict(state[name], strict=True)


def _model_states(policy: Policy, metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        name: model.sharded_state_dict(metadata=metadata)
        for name, model in zip(_model_names(policy), policy.models(), strict=True)
    }


def _state_dict(policy: Policy, loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # Megatron adds this layout's groups to it
    state = _model_states(policy, metadata)
    with state_dict_without_copies(policy.optimizer.chained_optimizers):
        state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    state["schedule"] = policy.schedule.state_dict()
    state["main_weights"] = _main_weight_format(policy)
    return state


def _main_weight_format(policy: Policy) -> str:
    """Return the format of the main weights in this policy's checkpoints."""
    return "remainders" if stores_param_remainders(policy.optimizer.chained_optimizers) else "whole"


def _model_names(policy: Policy) -> list[str]:
    count = len(policy.chunks)
    return ["model"] if count == 1 else [f"model{chunk}" for chunk in range(count)]


def _optimizer_states(policy: Policy, state: dict[Any, Any]) -> dict[Any, Any]:
    """Convert a loaded optimizer state to the chained optimizers of this layout.

    Dense and expert parameters have separate optimizers only where their sharding differs, and param groups (steps,
    learning rates) are saved as the saving layout had them. Both kinds are always at the same step, so every saved
    group serves for either.
    """
    count = len(policy.optimizer.chained_optimizers)
    parts = [state, *(state[key] for key in sorted(key for key in state if isinstance(key, int)))]
    saved = [group for part in parts if "optimizer" in part for group in part["optimizer"]["param_groups"]]
    groups = [group | {"is_expert_parallel": expert} for group in saved for expert in (False, True)]
    remainders = _main_weight_format(policy) == "remainders"

    def convert(part: dict[Any, Any]) -> dict[str, Any]:
        param_state = part["param_state"]
        return {
            "optimizer": {"param_groups": groups},
            "param_state": as_remainders(param_state) if remainders else param_state,
            "param_state_sharding_type": METADATA["distrib_optim_sharding_type"],
        }

    return convert(state) if count == 1 else {index: convert(state[index]) for index in range(count)}
