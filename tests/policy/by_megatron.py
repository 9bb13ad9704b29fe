"""Load a converted checkpoint, and save weights, by Megatron itself."""

from itertools import product
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size

from grpo_mp.platform.te_layers import GroupedLinear
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


def _sharded_state_dict(
    self: GroupedLinear, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the entries of a layer's experts on a CPU: one tensor with a leading expert axis."""
    metadata = metadata or {}
    singleton = metadata.get("singleton_local_shards", False)
    experts = get_pg_size(self.groups.ep) * self.num_gemms
    state: dict[str, Any] = {}
    kinds = ("weight", "bias") if hasattr(self, "bias0") else ("weight",)
    for i, kind in product(range(self.num_gemms), kinds):
        key = f"{i}.{kind}"
        expert = get_pg_rank(self.groups.ep) * self.num_gemms + i
        entry = make_sharded_tensors_for_checkpoint(
            {key: getattr(self, f"{kind}{i}")},
            "",
            {key: self.partition_dim} if kind == "weight" or self.partition_dim == 0 else {},
            sharded_offsets if singleton else (*sharded_offsets, (len(sharded_offsets), expert, experts)),
            tp_group=self.groups.expt_tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        replace_prefix_for_sharding(entry, f"{i}.", f"{expert}.{prefix}" if singleton else prefix)
        tensor = state[f"{prefix}{kind}{i}"] = entry[key]
        tensor.replica_id = (*tensor.replica_id[:2], get_pg_rank(self.groups.expt_dp))
    return state


GroupedLinear.sharded_state_dict = _sharded_state_dict  # type: ignore[attr-defined]
