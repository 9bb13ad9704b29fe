"""Low-rank adapters (LoRA, arXiv 2106.09685) beside Megatron's parallel linear layers, which are frozen.

y = W x + (alpha / rank) B A x, for the input x of a linear layer with weight W. A is sharded if W is row-parallel, B if
W is column-parallel. Tensor-parallel ranks exchange only A x: `rank` numbers per token.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from grpo_mp.config.sections import LayoutConfig, LoraConfig
from grpo_mp.distributed.coordinates import RankCoordinates, tensor_part, tp_size
from grpo_mp.models.lora import A, Adapter, B, adapters_of
from grpo_mp.models.mapping import Param, fuse, shard_ranges
from grpo_mp.platform.te_layers import grouped_matmul
from grpo_mp.policy.model import PolicyModel
from grpo_mp.policy.weights import full_name

NORM = "layer_norm_weight"  # attribute of a linear layer that is fused with the norm before it


@dataclass(frozen=True)
class Factors:
    """Adapters of one Megatron weight, whose tensor-parallel size is `tensor`.

    A fused weight, such as linear_qkv, has one adapter for each targeted module in it.
    """

    param: Param
    adapters: tuple[Adapter, ...]
    tensor: int

    def a(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the adapters' A matrices, stacked to [adapters * rank, in]."""
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

    def b(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the adapters' B matrices as one block matrix [out, adapters * rank], zero outside the blocks.

        The block of an adapter is in the rows of its module and in the columns of its A.
        """
        if len(self.param.hf) == 1:
            return tensors[0]
        rank = tensors[0].shape[1]
        by_part = dict(zip((one.part for one in self.adapters), tensors, strict=True))
        blocks = []
        before = 0
        width = rank * len(tensors)
        for part, shape in enumerate(self.param.shapes):
            if part in by_part:
                blocks.append(functional.pad(by_part[part], (before, width - before - rank)))
                before += rank
            else:
                rows, _ = self.param.shard_shape(shape, self.tensor)
                blocks.append(tensors[0].new_zeros(rows, width))
        return fuse(self.param, blocks)


class MergedWeights(Mapping[str, Tensor]):
    """This rank's weights by name, with the adapters merged: W + (alpha / rank) B A, computed at each access."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        params: Mapping[str, Param],
        layout: LayoutConfig,
        lora: LoraConfig,
    ) -> None:
        """`tensors`: this rank's tensors, adapters included; `params`: parameters of the model without adapters."""
        self._tensors = tensors
        self._scale = lora.scale
        self._factors = {
            name: Factors(
                params[name], adapters_of(params[name], lora.rank, lora.targets), tp_size(params[name], layout)
            )
            for name in tensors
            if name in params
        }

    def __getitem__(self, name: str) -> Tensor:
        weight = self._tensors[name].detach()
        factors = self._factors[name]
        if not factors.adapters:
            return weight
        a = factors.a([self._tensors[one.a.name].detach().float() for one in factors.adapters])
        b = factors.b([self._tensors[one.b.name].detach().float() for one in factors.adapters])
        return torch.addmm(weight.float(), b, a, alpha=self._scale).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)


def add_adapters(
    chunks: Sequence[PolicyModel],
    params: dict[str, Param],
    coords: RankCoordinates,
    layout: LayoutConfig,
    lora: LoraConfig,
) -> None:
    """Freeze the chunks and register zero adapters. `params`: parameters of the model without adapters."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        for linear, factors in _targeted(chunk, params, coords=coords, layout=layout, lora=lora).items():
            module = chunk.get_submodule(linear)
            _register(module, factors, chunk.config)
            add = _AddGrouped if factors["weight" if "weight" in factors else "weight0"].param.experts else _AddDense
            module.register_forward_hook(add(factors, lora.scale, chunk.config), with_kwargs=True)
        if chunk.pre_process:
            # A recomputed layer computes weight gradients only if its input requires a gradient.
            chunk.embedding.register_forward_hook(_ask_for_gradient)


@torch.no_grad()
def initialize(
    tensors: Mapping[str, Tensor],
    adapters: Mapping[str, Param],
    coords: RankCoordinates,
    layout: LayoutConfig,
    seed: int,
) -> None:
    """Set each B to zero and draw each A uniformly from +-1 / sqrt(in), as peft does; equal in every layout."""
    for name, param in adapters.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        (shape,) = param.shapes
        is_expert = param.expert is not None
        tensor.tensor_model_parallel = is_expert or param.tp_dim is not None  # type: ignore[attr-defined]
        tensor.shared = is_expert and param.tp_dim is None and coords.expert_tensor > 0  # type: ignore[attr-defined]
        if f".{B}." in name:
            tensor.zero_()
            continue
        digest = hashlib.sha256(f"{seed}/{param.hf[0]}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        drawn = torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(shape[1] ** 0.5)
        if param.tp_dim is not None:
            ((start, stop),) = shard_ranges(param, 0, tp_size(param, layout), tensor_part(param, coords))
            drawn = drawn.narrow(param.tp_dim, start, stop - start)
        tensor.copy_(drawn)


def _targeted(
    chunk: PolicyModel, params: dict[str, Param], coords: RankCoordinates, layout: LayoutConfig, lora: LoraConfig
) -> dict[str, dict[str, Factors]]:
    """Return the adapters of the chunk's targeted linear layers: module name -> weight name -> Factors."""
    found: dict[str, dict[str, Factors]] = {}
    for name, _ in chunk.named_parameters():
        param = params.get(
            full_name(name, chunk, params=params, expert_rank=coords.expert, expert_parallel=layout.expert)
        )
        adapters = adapters_of(param, lora.rank, lora.targets) if param else ()
        if param and adapters:
            linear, _, weight = name.rpartition(".")
            found.setdefault(linear, {})[weight] = Factors(param, adapters, tp_size(param, layout))
    return found


def _register(module: nn.Module, factors: Mapping[str, Factors], config: Any) -> None:
    """Register the adapters' parameters in a linear layer as lora_A.q_proj.weight, for expert 3 as ....weight3."""
    for kind in (A, B):
        setattr(module, kind, nn.ModuleDict())
    for weight, of_weight in factors.items():
        device = getattr(module, weight).device
        for adapter in of_weight.adapters:
            for kind, param in ((A, adapter.a), (B, adapter.b)):
                shape = param.shard_shape(param.shapes[0], of_weight.tensor)
                tensor = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device))
                if param.expert is None:
                    # A replicated factor gets a part of its gradient on each rank; with this mark Megatron sums them.
                    tensor.sequence_parallel = config.sequence_parallel and param.tp_dim is None  # type: ignore[attr-defined]
                by_leaf = getattr(module, kind)
                leaf = param.name.split(".")[-2]
                if leaf not in by_leaf:
                    by_leaf[leaf] = nn.Module()
                by_leaf[leaf].register_parameter(weight, tensor)


def _tensors(module: nn.Module, kind: str, weight: str, factors: Factors) -> list[Tensor]:
    by_leaf = getattr(module, kind)
    return [getattr(by_leaf[adapter.a.name.split(".")[-2]], weight) for adapter in factors.adapters]


@dataclass(frozen=True)
class _AddDense:
    """Forward hook that adds the adapters' output to a dense linear layer, tensor-parallel or replicated."""

    factors: Mapping[str, Factors]
    scale: float
    config: Any

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Return the layer's output [s, ..., out] plus the adapters' output for the input [s', ..., in]."""
        (weight, factors) = next(iter(self.factors.items()))
        (x, *_) = args
        if hasattr(module, NORM):
            norm = getattr(module, NORM) + self.config.layernorm_zero_centered_gamma
            x = functional.rms_norm(x, x.shape[-1:], norm, self.config.layernorm_epsilon)
        hidden = x @ factors.a(_tensors(module, A, weight, factors)).t()
        if self.config.sequence_parallel and factors.param.tp_dim is not None:
            group = parallel_state.get_tensor_model_parallel_group()
            is_column = factors.param.tp_dim == 0
            move: Callable[..., Tensor] = (
                gather_from_sequence_parallel_region if is_column else reduce_scatter_to_sequence_parallel_region
            )
            hidden = move(hidden, group=group)
        b = factors.b(_tensors(module, B, weight, factors))
        (own, *bias) = output
        added = torch.addmm(own.flatten(0, -2), hidden.flatten(0, -2), b.t(), alpha=self.scale)
        return (added.view_as(own), *bias)


@dataclass(frozen=True)
class _AddGrouped:
    """Forward hook that adds the adapters' output to a grouped linear layer of the local experts."""

    factors: Mapping[str, Factors]
    scale: float
    config: Any

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        x, splits, *_ = args
        splits = splits.tolist() if isinstance(splits, Tensor) else splits
        a = [of.a(self._whole(of, A, _tensors(module, A, weight, of))) for weight, of in self.factors.items()]
        b = [of.b(self._whole(of, B, _tensors(module, B, weight, of))) for weight, of in self.factors.items()]
        hidden = grouped_matmul(x, splits, a) * self.scale
        own, *bias = output
        return (own + grouped_matmul(hidden, splits, b), *bias)

    def _whole(self, factors: Factors, kind: str, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors; if replicated, their gradients are summed over the expert-tensor-parallel ranks.

        Each of these ranks has only a shard of the other factor, so it computes a part of the gradient.
        """
        divided = factors.param.tp_dim == (1 if kind == A else 0)
        if self.config.expert_tensor_parallel_size == 1 or divided:
            return tensors
        group = parallel_state.get_expert_tensor_parallel_group()
        return [copy_to_tensor_model_parallel_region(tensor, group=group) for tensor in tensors]


def _ask_for_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_(torch.is_grad_enabled())
