"""Save and load weights and optimizer in Megatron's torch_dist format, which any layout can load."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mp.checkpoint.safe_metadata import restrict_unpickling
from grpo_mp.errors import UserError, one_line
from grpo_mp.policy.model import PolicyModel
from grpo_mp.policy.policy import Policy
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
    policy.lr_scheduler.load_state_dict(state["schedule"])


def save_reference(policy: Policy, folder: Path) -> None:
    """Write the reference's weights into an empty, existing folder. Every rank must call this."""
    with policy.use_reference_weights():
        dist_checkpointing.save(_model_states(policy, dict(METADATA)), str(folder))


def load_reference(policy: Policy, folder: Path) -> None:
    """Read what `save_reference` wrote, from any layout. Every rank must call this; raises as `load_policy`."""
    with policy.use_reference_weights():
        _load_models(policy, _read(_model_states(policy, dict(METADATA)), folder))


def _clone_optimizer_views(state: dict[str, Any]) -> None:
    """Replace views of gathered host buffers by copies, buffer by buffer, so that each buffer is freed.

    Megatron's writer would copy all of them while the buffers still exist.
    """
    apply_factories(state)
    sharded = [value for value in nested_values(state["optimizer"]) if isinstance(value, ShardedTensor)]
    on_host = [tensor for tensor in sharded if tensor.data is not None and tensor.data.device.type == "cpu"]
    views = [tensor for tensor in on_host if tensor.data.untyped_storage().size() != tensor.data.nbytes]
    for tensor in sorted(views, key=lambda view: view.data.untyped_storage().data_ptr()):
        tensor.data = tensor.data.clone()


def _read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        with restrict_unpickling(folder):
            return dict(dist_checkpointing.load(state, str(folder)))
    except (CheckpointException, CheckpointingException, OSError, KeyError, RuntimeError) as error:
        # torch gives the errors of all ranks with their stack traces: take the first rank's.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise UserError(f"{folder}: the checkpoint cannot be read: {one_line(cause)}") from error


def _models(policy: Policy) -> dict[str, PolicyModel]:
    """Return this rank's model chunks by their names in a checkpoint."""
    models = policy.models()
    return {f"model{chunk}" if len(models) > 1 else "model": model for chunk, model in enumerate(models)}


def _load_models(policy: Policy, state: dict[str, Any]) -> None:
    for name, model in _models(policy).items():
        model.load_state_dict(state[name], strict=True)


def _model_states(policy: Policy, metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: model.sharded_state_dict(metadata=metadata) for name, model in _models(policy).items()}


def _state_dict(policy: Policy, loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # Megatron adds this layout's groups to it
    state = _model_states(policy, metadata)
    with state_dict_without_copies(policy.optimizer.chained_optimizers):
        state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    state["schedule"] = policy.lr_scheduler.state_dict()
    state["main_weights"] = _main_weight_format(policy)
    return state


def _main_weight_format(policy: Policy) -> str:
    """Return the format of the main weights in this policy's checkpoints."""
    return "remainders" if stores_param_remainders(policy.optimizer.chained_optimizers) else "whole"


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
