"""Loads single experts into SGLang's GPT-OSS, whose own loader takes the experts of a layer in one tensor.

Its layer has the rows of gate and up in turn, as the files have. With SGLang's package `triton_kernels` all matrices
are transposed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from grpo_mp.checkpoint.stacked_experts import EXPERT, TURNS


def load_experts(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Load this rank's part of each tensor of an expert with biases; yield all other tensors."""
    modules = dict(model.named_modules())
    for name, tensor in tensors:
        match = EXPERT.match(name)
        layer = modules.get(match[1]) if match else None
        if match and layer is not None and hasattr(layer, "w13_weight_bias"):
            _load(layer, int(match[2]), part=match[3], is_bias=match[4] == "bias", tensor=tensor)
        else:
            yield name, tensor


def _load(layer: Any, expert: int, part: str, is_bias: bool, tensor: Tensor) -> None:
    """Load a projection or bias of an expert. The intermediate rows are divided over `moe_tp_size` ranks and padded."""
    expert = layer._map_global_expert_id_to_local_expert_id(expert)
    if expert < 0:
        return
    is_down = part not in TURNS
    target = getattr(layer, f"w{2 if is_down else 13}_weight{'_bias' if is_bias else ''}").data[expert]
    if layer.use_triton_kernels and not is_bias:
        target = target.t()
    if is_down and is_bias:
        target[: len(tensor)].copy_(tensor)
        if layer.moe_tp_rank > 0:  # the ranks' outputs are summed
            target.zero_()
        return
    axis = int(is_down)
    if not is_down:
        target = target[TURNS[part] :: len(TURNS)]
    padded = target.shape[axis]
    count = padded if layer.use_padded_loading else tensor.shape[axis] // layer.moe_tp_size
    start = min(layer.moe_tp_rank * count, tensor.shape[axis])
    count = min(count, tensor.shape[axis] - start)
    if count < padded:
        target.narrow(axis, count, padded - count).zero_()
    target.narrow(axis, 0, count).copy_(tensor.narrow(axis, start, count))
