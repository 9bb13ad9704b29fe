"""Find this rank's parameters by full-model name, and load them from Hugging Face files."""

import re
from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from grpo_mp.checkpoint.hf_reader import HfReader, check_finite, check_shape
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import RankCoordinates, tensor_part, tp_size
from grpo_mp.models.mapping import Param, fuse, shard_ranges
from grpo_mp.policy.model import PolicyModel
from grpo_mp.utils.errors import UserError

# megatron-core calls the layer inside mtp_model_layer from 0.19 on, and transformer_layer in older versions.
MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.(?:transformer_layer\.|mtp_model_layer\.)?")
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
LOCAL_EXPERT = re.compile(r"(?<=\.weight)\d+$|(?<=\.bias)\d+$")


def local_tensors(
    chunks: Sequence[PolicyModel], params: dict[str, Param], coords: RankCoordinates, expert_parallel: int
) -> dict[str, torch.Tensor]:
    """Return this rank's parameters, and its buffers that are in `params`, by full-model name."""
    tensors: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            full = full_name(name, chunk, params=params, expert_rank=coords.expert, expert_parallel=expert_parallel)
            if full in params:
                tensors[full] = tensor
            elif isinstance(tensor, torch.nn.Parameter):
                raise UserError(f"the parameter mapping has no rule for Megatron's {name}")
    return tensors


@torch.no_grad()
def clear_weights(tensors: dict[str, torch.Tensor], params: dict[str, Param]) -> None:
    """Set all tensors to zero, after those marked `keep_float32` are converted to float32."""
    for name, tensor in tensors.items():
        if params[name].keep_float32:
            # Megatron would convert it only at the first forward, after the loaded values were rounded to bfloat16.
            tensor.data = tensor.data.float()
        tensor.zero_()


@torch.no_grad()
def load_hf(
    tensors: dict[str, torch.Tensor],
    params: dict[str, Param],
    reader: HfReader,
    coords: RankCoordinates,
    layout: LayoutConfig,
) -> None:
    """Load this rank's tensors from Hugging Face files, reading only its slices. Vocabulary padding is zero."""
    clear_weights(tensors, params)
    for name, tensor in tensors.items():
        param = params[name]
        count = tp_size(param, layout)
        part = tensor_part(param, coords)
        fused = _read(param, reader, count, part, tensor.dtype)
        tensor[: fused.shape[0]].copy_(fused)


def _read(param: Param, reader: HfReader, count: int, part: int, dtype: torch.dtype) -> torch.Tensor:
    shards = []
    for index, (hf_name, shape) in enumerate(zip(param.hf, param.shapes, strict=True)):
        check_shape(reader, hf_name, shape)
        if count > 1:
            ranges = shard_ranges(param, index, count, part)
            shard = torch.cat([reader.read(hf_name, param.tp_dim, *range_) for range_ in ranges], dim=param.tp_dim or 0)
        else:
            shard = reader.read(hf_name)
        shards.append(check_finite(shard, reader.folder, hf_name, dtype))
    return fuse(param, shards)


def full_name(name: str, chunk: PolicyModel, params: dict[str, Param], expert_rank: int, expert_parallel: int) -> str:
    """Return a parameter's full-model name: its local layer and expert numbers are replaced by global ones.

    A multi-token-prediction layer gets the number after the last decoder layer, without a prefix for the layer in it.
    """
    if match := MTP_LAYER.match(name):
        name = f"decoder.layers.{chunk.config.num_layers + int(match.group(1))}.{name[match.end() :]}"
    elif match := LAYER.match(name):
        layer: TransformerLayer = chunk.decoder.layers[int(match.group(1))]
        name = f"decoder.layers.{layer.layer_number - 1}.{name[match.end() :]}"
    else:
        is_copy = name.startswith("embedding.") and not chunk.pre_process
        return f"mtp.{name}" if is_copy else name
    expert = LOCAL_EXPERT.search(name)
    if not expert:
        return name
    experts = params[LOCAL_EXPERT.sub("0", name)].experts
    return LOCAL_EXPERT.sub(str(int(expert.group()) + expert_rank * (experts // expert_parallel)), name)
