"""Read the weights of checkpoints that former versions wrote, in Megatron's torch_dist format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mp.checkpoint.safe_metadata import restrict_unpickling
from grpo_mp.policy.model import PolicyModel
from grpo_mp.policy.trained_model import TrainedModel
from grpo_mp.utils.errors import UserError, one_line

METADATA = {"singleton_local_shards": False}  # of the format of the weights


def is_torch_dist_of_megatron(folder: Path) -> bool:
    """Return whether Megatron wrote the folder."""
    return (folder / CONFIG_FNAME).is_file()


def read_torch_dist(policy: TrainedModel, folder: Path) -> Mapping[str, Any]:
    """Load the weights of all model chunks, from any layout; return what was saved beside them.

    Every rank must call this. Raises UserError where the checkpoint is incomplete or belongs to another model.
    """
    models = _models(policy)
    metadata = {name: dict(METADATA) for name in models}  # Megatron adds this layout's groups to each
    sharded = {name: model.sharded_state_dict(metadata=metadata[name]) for name, model in models.items()}
    try:
        with restrict_unpickling(folder):
            state = dict(dist_checkpointing.load(sharded, str(folder)))
    except (CheckpointException, CheckpointingException, OSError, KeyError, RuntimeError) as error:
        # torch gives the errors of all ranks with their stack traces: take the first rank's.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise UserError(f"{folder}: the checkpoint cannot be read: {one_line(cause)}") from error
    for name, model in models.items():
        model.load_state_dict(state[name], strict=True)
    return state


def _models(policy: TrainedModel) -> dict[str, PolicyModel]:
    """Return this rank's model chunks by their names in a checkpoint."""
    models = policy.models()
    return {f"model{chunk}" if len(models) > 1 else "model": model for chunk, model in enumerate(models)}
