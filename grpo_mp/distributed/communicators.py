"""Which NCCL communicators a rank of the trainer has: those of Megatron's groups that a step uses. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import data_parallel_size

WORLD = "WORLD"  # of torch: weight sync, checkpoints
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"


@dataclass(frozen=True)
class Communicator:
    """A group of more than one rank. `group`: its name in Megatron; `stride`: from one of its ranks to the next."""

    group: str
    ranks: int
    stride: int

    def fits_in(self, gpus_per_node: int) -> bool:
        return self.ranks * self.stride <= gpus_per_node


def communicators(layout: LayoutConfig, world_size: int, has_experts: bool, tied: bool) -> tuple[Communicator, ...]:
    """Return the communicators of one rank.

    torch makes a communicator when its group is first used; most of Megatron's groups never are. `tied`: the last stage
    has a copy of the embedding, as its output layer or for a multi-token-prediction layer.
    """
    return tuple(group for group in _groups(layout, world_size, has_experts, tied) if group.ranks > 1)


def _groups(layout: LayoutConfig, world_size: int, has_experts: bool, tied: bool) -> Iterator[Communicator]:
    data = data_parallel_size(layout, world_size)
    stage = world_size // layout.pipeline
    yield Communicator(WORLD, world_size, 1)
    yield Communicator("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", world_size, 1)  # norm of the gradient
    yield Communicator("DATA_PARALLEL_GROUP_WITH_CP", data * layout.context, layout.tensor)
    yield Communicator("TENSOR_MODEL_PARALLEL_GROUP", layout.tensor, 1)
    yield Communicator("CONTEXT_PARALLEL_GROUP", layout.context, layout.tensor)
    yield Communicator(PIPELINE, layout.pipeline, stage)
    if tied and layout.pipeline > 1:  # the first and the last stage sum the gradient of the embedding
        yield Communicator("EMBEDDING_GROUP", 2, stage * (layout.pipeline - 1))
    if has_experts:
        yield from _expert_groups(layout, stage)


def _expert_groups(layout: LayoutConfig, stage: int) -> Iterator[Communicator]:
    divided = layout.expert * layout.expert_tensor
    # Megatron-Core 0.19 sums the tokens of each expert there, where routers have a bias.
    yield Communicator("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", stage, 1)
    yield Communicator("EXPERT_MODEL_PARALLEL_GROUP", layout.expert, layout.expert_tensor)
    yield Communicator("EXPERT_TENSOR_PARALLEL_GROUP", layout.expert_tensor, 1)
    yield Communicator("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", divided, 1)  # counts of tokens
    if layout.expert > 1 or layout.expert_tensor != layout.tensor:
        yield Communicator("EXPERT_DATA_PARALLEL_GROUP", stage // divided, divided)
