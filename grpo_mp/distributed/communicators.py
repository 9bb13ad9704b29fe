"""NCCL communicators of a training rank: those of the Megatron process groups that a step uses."""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import data_parallel_size

WORLD = "WORLD"  # torch's default group: weight sync, checkpoints
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"


@dataclass(frozen=True)
class Communicator:
    """A process group of several ranks. `group`: its name in Megatron; `stride`: difference of adjacent ranks."""

    group: str
    ranks: int
    stride: int

    def fits_in(self, gpus_per_node: int) -> bool:
        return self.ranks * self.stride <= gpus_per_node


def communicators(layout: LayoutConfig, world_size: int, has_experts: bool, tied: bool) -> tuple[Communicator, ...]:
    """Return the communicators of one training rank.

    torch creates a communicator when its group is first used, and most Megatron groups never are. `tied`: the last
    stage has a copy of the embedding, for its output layer or a multi-token-prediction layer.
    """
    return tuple(group for group in _groups(layout, world_size, has_experts, tied) if group.ranks > 1)


def _groups(layout: LayoutConfig, world_size: int, has_experts: bool, tied: bool) -> Iterator[Communicator]:
    data = data_parallel_size(layout, world_size)
    stage = world_size // layout.pipeline
    yield Communicator(WORLD, world_size, 1)
    yield Communicator("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", world_size, 1)  # gradient norm
    yield Communicator("DATA_PARALLEL_GROUP_WITH_CP", data * layout.context, layout.tensor)
    yield Communicator("TENSOR_MODEL_PARALLEL_GROUP", layout.tensor, 1)
    yield Communicator("CONTEXT_PARALLEL_GROUP", layout.context, layout.tensor)
    yield Communicator(PIPELINE, layout.pipeline, stage)
    if tied and layout.pipeline > 1:  # first and last stage all-reduce the embedding gradient
        yield Communicator("EMBEDDING_GROUP", 2, stage * (layout.pipeline - 1))
    if has_experts:
        yield from _expert_groups(layout, stage)


def _expert_groups(layout: LayoutConfig, stage: int) -> Iterator[Communicator]:
    divided = layout.expert * layout.expert_tensor
    # Megatron-Core 0.19 all-reduces the tokens per expert in this group if routers have a bias.
    yield Communicator("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", stage, 1)
    yield Communicator("EXPERT_MODEL_PARALLEL_GROUP", layout.expert, layout.expert_tensor)
    yield Communicator("EXPERT_TENSOR_PARALLEL_GROUP", layout.expert_tensor, 1)
    yield Communicator("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", divided, 1)  # token counts per expert
    if layout.expert > 1 or layout.expert_tensor != layout.tensor:
        yield Communicator("EXPERT_DATA_PARALLEL_GROUP", stage // divided, divided)
