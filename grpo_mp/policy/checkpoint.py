"""Save and load weights in Megatron's torch_dist format and the optimizer in pieces; any layout can load both."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mp.checkpoint.safe_metadata import restrict_unpickling
from grpo_mp.errors import UserError, one_line
from grpo_mp.policy.model import PolicyModel
from grpo_mp.policy.optimizer_state import load_optimizer_state, save_optimizer_state
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.te_adam import state_dict_without_copies, stores_param_remainders

METADATA = {"singleton_local_shards": False}  # of the format of the weights


def save_policy(policy: Policy, folder: Path) -> None:
    """Write weights, optimizer and learning-rate step into an empty, existing folder.

    Every rank must call this.
    """
    state = _model_states(policy)
    with state_dict_without_copies(policy.optimizer.chained_optimizers):
        states = [part.state_dict() for part in policy.optimizer.chained_optimizers]
    state["optimizer_groups"] = [group for part in states for group in part["optimizer"]["param_groups"]]
    state["schedule"] = policy.lr_scheduler.state_dict()
    state["main_weights"] = _main_weight_format(policy)
    dist_checkpointing.save(state, str(folder))
    save_optimizer_state(policy, folder)


def load_policy(policy: Policy, folder: Path) -> None:
    """Read what `save_policy` wrote, from any layout. Every rank must call this.

    Raises UserError where the checkpoint is incomplete or belongs to another model.
    """
    state = _read(_model_states(policy), folder)
    saved, expected = state.get("main_weights", "whole"), _main_weight_format(policy)
    if saved != expected:
        raise UserError(
            f"{folder}: the checkpoint holds main weights as {saved}, training.megatron_args asks for {expected}: set "
            "use_precision_aware_optimizer and store_param_remainders as they were"
        )
    _load_models(policy, state)
    groups = _optimizer_groups(state["optimizer_groups"])
    parts = policy.optimizer.chained_optimizers
    with state_dict_without_copies(parts):
        for part in parts:
            part.load_state_dict({"optimizer": {"param_groups": groups}})
    load_optimizer_state(policy, folder)
    policy.lr_scheduler.load_state_dict(state["schedule"])


def save_reference(policy: Policy, folder: Path) -> None:
    """Write the reference's weights into an empty, existing folder. Every rank must call this."""
    with policy.use_reference_weights():
        dist_checkpointing.save(_model_states(policy), str(folder))


def load_reference(policy: Policy, folder: Path) -> None:
    """Read what `save_reference` wrote, from any layout. Every rank must call this; raises as `load_policy`."""
    with policy.use_reference_weights():
        _load_models(policy, _read(_model_states(policy), folder))


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


def _model_states(policy: Policy) -> dict[str, Any]:
    metadata = dict(METADATA)  # Megatron adds this layout's groups to it
    return {name: model.sharded_state_dict(metadata=metadata) for name, model in _models(policy).items()}


def _main_weight_format(policy: Policy) -> str:
    """Return the format of the main weights in this policy's checkpoints."""
    return "remainders" if stores_param_remainders(policy.optimizer.chained_optimizers) else "whole"


def _optimizer_groups(saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return saved param groups (steps, learning rates) for the optimizers of any layout.

    Dense and expert parameters have separate optimizers only where their sharding differs, and groups are saved as the
    saving layout had them. Both kinds are always at the same step, so every saved group serves for either.
    """
    return [group | {"is_expert_parallel": expert} for group in saved for expert in (False, True)]
