"""This rank's parameters under their names in the whole model, and their way from and to Hugging Face files."""

import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from grpo_mp.checkpoint.hf_reader import Weights, check_shape
from grpo_mp.distributed.coordinates import RankCoordinates
from grpo_mp.errors import UserError
from grpo_mp.models.mapping import Param, fuse, shard_range
from grpo_mp.policy.model import PolicyModel

EXPERT = re.compile(r"(?<=\.weight)\d+$")


def local_tensors(
    chunks: Sequence[PolicyModel], params: dict[str, Param], coords: RankCoordinates, expert_parallel: int
) -> dict[str, torch.Tensor]:
    """Every parameter (and persistent buffer that the mapping names) of this rank, by its whole-model name.

    Raises UserError for a Megatron parameter that the mapping does not know.
    """
    tensors: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, tensor in _named(chunk):
            whole = _whole_name(name, chunk, params, coords.expert, expert_parallel)
            if whole in params:
                tensors[whole] = tensor
            elif isinstance(tensor, torch.nn.Parameter):
                raise UserError(f"the parameter mapping has no rule for Megatron's {name}")
    return tensors


def tensor_part(param: Param, coords: RankCoordinates) -> int:
    """Which tensor-parallel part of `param` this rank holds; 0 where it is not split."""
    if param.tp_dim is None:
        return 0
    return coords.expert_tensor if param.expert is not None else coords.tensor


@torch.no_grad()
def load_hf(
    tensors: dict[str, torch.Tensor],
    params: dict[str, Param],
    reader: Weights,
    coords: RankCoordinates,
    parts: "TpSizes",
) -> None:
    """Fill this rank's tensors from Hugging Face files, reading only the slices it holds.

    Raises UserError where a tensor is missing or has another shape than the config says.
    """
    for name, tensor in tensors.items():
        param = params[name]
        count, part = parts.count(param), tensor_part(param, coords)
        shards = [
            _read(reader, param, hf_name, shape, count, part)
            for hf_name, shape in zip(param.hf, param.shapes, strict=True)
        ]
        whole = fuse(param, shards)
        if param.keep_float32:
            tensor.data = tensor.data.float()  # Megatron widens it at the first forward, after bfloat16 has rounded it
        tensor.zero_()  # rows of vocabulary padding stay zero
        tensor[: whole.shape[0]].copy_(whole)


class TpSizes:
    """How many tensor-parallel parts dense and expert parameters have."""

    def __init__(self, tensor: int, expert_tensor: int) -> None:
        self.tensor, self.expert_tensor = tensor, expert_tensor

    def count(self, param: Param) -> int:
        return self.expert_tensor if param.expert is not None else self.tensor


def _read(reader: Weights, param: Param, name: str, shape: tuple[int, ...], parts: int, part: int) -> torch.Tensor:
    check_shape(reader, name, shape)
    if param.tp_dim is None or parts == 1:
        return reader.read(name)
    return reader.read(name, param.tp_dim, *shard_range(param, shape, parts, part))


def _named(chunk: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_parameters()
    yield from chunk.named_buffers()


def _whole_name(name: str, chunk: PolicyModel, params: dict[str, Param], expert_rank: int, expert_parallel: int) -> str:
    """Local layer and expert numbers -> those of the whole model."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if not match:
        return name
    layer: TransformerLayer = chunk.decoder.layers[int(match.group(1))]
    name = f"decoder.layers.{layer.layer_number - 1}.{name[match.end() :]}"
    expert = EXPERT.search(name)
    if not expert:
        return name
    experts = params[EXPERT.sub("0", name)].experts
    return EXPERT.sub(str(int(expert.group()) + expert_rank * (experts // expert_parallel)), name)
