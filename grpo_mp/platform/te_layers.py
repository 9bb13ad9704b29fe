"""CPU modules with TransformerEngine's interface and parameter names.

A model therefore has the same parameter names on a CPU as on a GPU, such as `experts.linear_fc1.weight3`, and
checkpoints and the parameter mapping fit both. megatron_patches loads this module when megatron.core is imported.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.utils import get_pg_size
from torch import Tensor
from torch.nn import functional


def _set_attributes(param: Tensor, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(param, name, value)


def _check_norm(config: Any) -> None:
    if config.normalization != "RMSNorm":
        raise NotImplementedError("the norm on a CPU is RMSNorm")


class Norm:
    """RMSNorm or LayerNorm, by the config."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:  # type: ignore[misc]
        if config.normalization == "LayerNorm":
            return torch.nn.LayerNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        return RmsNorm(config, hidden_size, eps)


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient Megatron sums over tensor-parallel ranks with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        _check_norm(config)
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _set_attributes(self.weight, sequence_parallel=config.sequence_parallel)
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        return functional.rms_norm(x, weight.shape, weight, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm followed by a column-parallel linear layer."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        _check_norm(config)
        super().__init__(input_size, output_size, config=config, **kwargs)
        weight = torch.ones(input_size, dtype=config.params_dtype, device=self.weight.device)
        self.layer_norm_weight = torch.nn.Parameter(weight)
        _set_attributes(self.layer_norm_weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Map x [s, b, input_size] -> [s', b, output_size / tensor-parallel size].

        With sequence parallelism, s' = s * tensor-parallel size, else s' = s.
        """
        centred_on_zero = self.config.layernorm_zero_centered_gamma
        weight = self.layer_norm_weight + 1 if centred_on_zero else self.layer_norm_weight
        normed = functional.rms_norm(x, weight.shape, weight, self.config.layernorm_epsilon)
        return super().forward(normed, **kwargs)


class DuplicatedLinear(torch.nn.Linear):
    """Linear layer that is replicated over tensor-parallel ranks, for the down projections of latent attention."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        parallel_mode: str,
        bias: bool = False,
        **kwargs: Any,
    ) -> None:
        if parallel_mode != "duplicated" or bias:
            raise NotImplementedError(f"a linear layer on a CPU with parallel_mode {parallel_mode!r}, bias {bias}")
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)
        _set_attributes(self.weight, sequence_parallel=config.sequence_parallel, allreduce=True)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Map x [..., input_size] -> [..., output_size]; the second value, the bias, is None."""
        return functional.linear(x, self.weight), None


def grouped_matmul(x: Tensor, splits: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Return [tokens, out]: each group of rows of x [tokens, in] multiplied by its own weight [out, in].

    `splits`: rows of each group. The weight of a group without rows gets gradient 0 instead of None.
    """
    groups = zip(x.split(list(splits)), weights, strict=True)
    return torch.cat([functional.linear(group, weight) for group, weight in groups])


class GroupedLinear(torch.nn.Module):
    """One linear layer per local expert, with parameters `weight0`, `weight1`, ...; the MoE layer communicates.

    With biases `bias0`, `bias1`, ... `partition_dim`: axis of the weights [out, in] that expert-tensor parallelism
    shards; Megatron refuses it with biases.
    """

    partition_dim: int

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **kwargs: Any
    ) -> None:
        super().__init__()
        self.returns_bias = kwargs["skip_bias_add"]
        self.num_gemms = num_gemms
        self.groups = pg_collection
        shape = [output_size, input_size]
        shape[self.partition_dim] //= get_pg_size(pg_collection.expt_tp)
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            _set_attributes(weight, allreduce=config.expert_model_parallel_size == 1)
            _set_attributes(weight, tensor_model_parallel=True, partition_dim=self.partition_dim, partition_stride=1)
            self.register_parameter(f"weight{i}", weight)
            if kwargs["bias"]:
                bias = torch.nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                _set_attributes(bias, allreduce=config.expert_model_parallel_size == 1)
                self.register_parameter(f"bias{i}", bias)
        if not config.perform_initialization:
            return
        tracker = get_cuda_rng_tracker()
        name = get_expert_parallel_rng_tracker_name()
        with tracker.fork(name) if tracker.is_initialized() else contextlib.nullcontext():
            for tensor in self._of_experts("weight"):
                kwargs["init_method"](tensor)

    def forward(self, x: Tensor, splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Map x [tokens, in], sorted by expert, -> [tokens, out].

        The second value is the list of biases, if they are not added; `splits`: tokens of each expert.
        """
        # An expert without tokens gets gradient 0 instead of None. Overlapped gradient reduction waits for every
        # parameter, so a missing gradient would hang the run.
        weights = self._of_experts("weight")
        biases = self._of_experts("bias")
        if self.returns_bias or not biases:
            return grouped_matmul(x, splits, weights), biases or None
        groups = zip(x.split(list(splits)), weights, biases, strict=True)
        return torch.cat([functional.linear(group, weight, bias) for group, weight, bias in groups]), None

    def _of_experts(self, kind: str) -> list[Tensor]:
        return [getattr(self, f"{kind}{i}") for i in range(self.num_gemms) if hasattr(self, f"{kind}{i}")]


class ColumnParallelGroupedLinear(GroupedLinear):
    """First linear layer of the experts, sharded along the output."""

    partition_dim = 0


class RowParallelGroupedLinear(GroupedLinear):
    """Second linear layer of the experts, sharded along the input."""

    partition_dim = 1
