"""Load a converted checkpoint, and save weights, by Megatron itself."""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from grpo_mp.policy.policy import Policy

METADATA = {"singleton_local_shards": False}  # of the format of the weights


def load_by_megatron(policy: Policy, folder: Path) -> None:
    """Load the policy's weights, without TransformerEngine's extra states, which are empty."""
    models = policy.models()
    names = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    states = {
        name: {
            key: tensor
            for key, tensor in model.sharded_state_dict(metadata=dict(METADATA)).items()
            if not isinstance(tensor, ShardedObject)
        }
        for name, model in zip(names, models, strict=True)
    }
    loaded = dist_checkpointing.load(states, str(folder))
    for name, model in zip(names, models, strict=True):
        model.load_state_dict(loaded[name], strict=False)  # strict would miss the extra states


def save_by_megatron(policy: Policy, folder: Path) -> None:
    dist_checkpointing.save({"model": policy.models()[0].sharded_state_dict(metadata=dict(METADATA))}, str(folder))


def copies(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.tensors.items()}


def unequal(policy: Policy, expected: dict[str, torch.Tensor]) -> list[str]:
    assert policy.tensors.keys() == expected.keys()
    return [name for name, tensor in policy.tensors.items() if not torch.equal(tensor, expected[name])]
