"""Weights and optimizer state of this rank as rectangles of the Hugging Face tensors (models/chunks.py).

The distributed optimizer gives each rank a contiguous piece of each flattened parameter. A rank saves the state of its
piece, and the weights of it: so all ranks write about as much, and no element is written twice.
"""

from collections.abc import Iterator, Mapping

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from grpo_mp.checkpoint.chunk_files import TensorChunk
from grpo_mp.checkpoint.describe import WEIGHT
from grpo_mp.distributed.shards import tensor_part, tp_size
from grpo_mp.models.chunks import chunks_of
from grpo_mp.models.mapping import Param
from grpo_mp.policy.trained_model import TrainedModel

MAIN_PARAM = "main_param"
MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_chunks(policy: TrainedModel) -> Iterator[TensorChunk]:
    """Yield the chunks of this rank's optimizer state."""
    for part, model_param, name in _optimized(policy):
        start, stop = _piece(part, model_param)
        for state_name, tensor in _state_tensors(part, model_param).items():
            yield from _chunks(policy, policy.params[name], state_name, tensor.detach().view(-1), start, stop)


def weight_chunks(policy: TrainedModel, tensors: Mapping[str, Tensor]) -> Iterator[TensorChunk]:
    """Yield the chunks of `tensors`, weights by name, that this rank saves: its optimizer's pieces, and buffers."""
    pieces = {name: _piece(part, model_param) for part, model_param, name in _optimized(policy)}
    coords = policy.parallel.coords
    for name, tensor in tensors.items():
        param, flat = policy.params[name], tensor.detach().view(-1)
        if name in pieces:
            start, stop = pieces[name]
            yield from _chunks(policy, param, WEIGHT, flat[start:stop], start, stop)
        elif not policy.tensors[name].requires_grad:  # no optimizer has it: it is alike on all data-parallel ranks
            first = coords.expert_data == 0 if param.expert is not None else coords.context == coords.data == 0
            yield from _chunks(policy, param, WEIGHT, flat, 0, len(flat)) if first else ()


def local_weight_chunks(policy: TrainedModel, tensors: Mapping[str, Tensor]) -> Iterator[TensorChunk]:
    """Yield the chunks of all weights of this rank, which it loads."""
    for name, tensor in tensors.items():
        yield from _chunks(policy, policy.params[name], WEIGHT, tensor.detach().view(-1), 0, tensor.numel())


def _optimized(policy: TrainedModel) -> Iterator[tuple[MegatronOptimizer, torch.nn.Parameter, str]]:
    """Yield the parameters of which this rank's optimizers have a piece, with their names."""
    names = {tensor: name for name, tensor in policy.tensors.items()}
    for part in policy.optimizer.chained_optimizers:
        for model_param in part.model_param_group_index_map:
            yield part, model_param, names[model_param]


def _piece(part: MegatronOptimizer, model_param: torch.nn.Parameter) -> tuple[int, int]:
    piece = part._get_model_param_range_map(model_param)["param"]
    return piece.start, piece.end


def _chunks(
    policy: TrainedModel, param: Param, kept: str, flat: Tensor, start: int, stop: int
) -> Iterator[TensorChunk]:
    """Yield the chunks of elements [start, stop) of this rank's flattened shard; `flat` holds these elements."""
    layout, coords = policy.parallel.layout, policy.parallel.coords
    tp_rank = coords.tensor if param.expert is None else coords.expert_tensor
    for chunk in chunks_of(param, tp_size(param, layout), tensor_part(param, coords), start, stop):
        yield TensorChunk(
            name=f"{kept}/{param.hf[chunk.tensor]}",
            shape=param.shapes[chunk.tensor],
            offsets=chunk.offsets,
            tensor=flat[chunk.start - start : chunk.stop - start].view(chunk.sizes),
            is_replica=param.alias or (param.tp_dim is None and tp_rank > 0),
        )


def _state_tensors(part: MegatronOptimizer, model_param: torch.nn.Parameter) -> dict[str, Tensor]:
    """Return moments and main weight of a parameter's piece; none where the weights themselves are the main ones."""
    group, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    state = part.optimizer.state[main_param]
    tensors = {name: state[name] for name in MOMENTS}
    if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return tensors | {MAIN_PARAM: state["master_param"]}
    own_storage = main_param.untyped_storage().data_ptr() != model_param.untyped_storage().data_ptr()
    return tensors | ({MAIN_PARAM: main_param} if own_storage else {})
