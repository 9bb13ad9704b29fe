"""CPU modules with TransformerEngine's interface and parameter names.

A model built from Megatron's TransformerEngine spec has the same parameters on a CPU as on a GPU, such as
`linear_qkv.layer_norm_weight` and `experts.linear_fc1.weight3`: checkpoints and weight maps need one form.
Import megatron.core first: it loads this module itself (see patches).
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor


def _mark(param: Tensor, **marks: Any) -> None:
    """Set the attributes of a parameter by which Megatron knows how to reduce and save it."""
    for name, value in marks.items():
        setattr(param, name, value)


def _check_norm(config: Any) -> None:
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        raise NotImplementedError("the norm on a CPU is RMSNorm with an ordinary weight")


class _RmsNorm(torch.autograd.Function):
    """x / rms(x) * weight (arXiv 1910.07467, eq. 4). Torch composes it, and its gradient, of twice the operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad = grad.to(normed.dtype)
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        inner = grad * weight
        mean = torch.linalg.vecdot(inner, normed).unsqueeze(-1).div_(x.shape[-1])
        of_x = torch.addcmul(inner, normed, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [..., n] by its root mean square and scale it by weight [n]; the square is summed in float32."""
    normed: Tensor = _RmsNorm.apply(x, weight, eps)
    return normed


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient Megatron sums over tensor ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        _check_norm(config)
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.epsilon = eps
        _mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> the same shape."""
        return rms_norm(x, self.weight, self.epsilon)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        _check_norm(config)
        super().__init__(input_size, output_size, config=config, **kwargs)
        ones = torch.ones(input_size, dtype=config.params_dtype, device=self.weight.device)
        self.layer_norm_weight = torch.nn.Parameter(ones)
        _mark(self.layer_norm_weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """x [s, b, input_size] -> [s', b, output_size / tensor ranks], gathered along s under sequence parallelism."""
        x = rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(x, **kwargs)


class DuplicatedLinear(torch.nn.Linear):
    """Linear layer whose whole weight is on every tensor rank: the down projections of latent attention."""

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
        _mark(self.weight, sequence_parallel=config.sequence_parallel, allreduce=True)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """x [..., input_size] -> [..., output_size], and no bias."""
        return super().forward(x), None


class _GroupedProduct(torch.autograd.Function):
    """Each group of rows times its own weight, written where it belongs: torch would join the parts by a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.splits = splits
        out = x.new_empty(len(x), weights[0].shape[0])
        for rows, part, weight in zip(x.split(splits), out.split(splits), weights, strict=True):
            torch.mm(rows, weight.t(), out=part)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, *weights = ctx.saved_tensors
        parts = grad.contiguous().split(ctx.splits)
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        if of_x is not None:
            for part, target, weight in zip(parts, of_x.split(ctx.splits), weights, strict=True):
                torch.mm(part, weight, out=target)
        rows = x.split(ctx.splits)
        return of_x, None, *(part.t() @ group for part, group in zip(parts, rows, strict=True))


class GroupedLinear(torch.nn.Module):
    """One linear layer per local expert, parameters `weight0`, `weight1`, ...; the MoE layer does all exchange.

    `partition_dim` is the axis of the weight [out, in] that expert tensor parallelism splits.
    """

    partition_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("expert layers on a CPU have no bias")
        self.num_gemms, self.groups = num_gemms, pg_collection
        shape = [output_size, input_size]
        shape[self.partition_dim] //= get_pg_size(pg_collection.expt_tp)
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            _mark(weight, allreduce=config.expert_model_parallel_size == 1)
            _mark(weight, tensor_model_parallel=True, partition_dim=self.partition_dim, partition_stride=1)
            self.register_parameter(f"weight{i}", weight)
        if config.perform_initialization:
            self._initialise(init_method)

    def _initialise(self, init_method: Callable[[Tensor], Any]) -> None:
        tracker = get_cuda_rng_tracker()
        name = get_expert_parallel_rng_tracker_name()
        with tracker.fork(name) if tracker.is_initialized() else contextlib.nullcontext():
            for weight in self.parameters():
                init_method(weight)

    def forward(self, x: Tensor, splits: list[int]) -> tuple[Tensor, None]:
        """x [tokens, in] sorted by expert, `splits` tokens of each -> [tokens, out], and no bias."""
        # An expert without tokens takes part with no rows: its gradient is 0, not missing. Overlapped gradient
        # reduction waits for every parameter, so a missing one would stop the run.
        return _GroupedProduct.apply(x, splits, *self.parameters()), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Checkpoint entries: all experts of a layer are one tensor with a leading expert axis."""
        state: dict[str, Any] = {}
        for i, weight in enumerate(self.parameters()):
            state[f"{prefix}weight{i}"] = self._sharded(weight, i, prefix, sharded_offsets, metadata or {})
        return state

    def _sharded(self, weight: Tensor, i: int, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> Any:
        expert = get_pg_rank(self.groups.ep) * self.num_gemms + i
        experts = get_pg_size(self.groups.ep) * self.num_gemms
        singleton = metadata.get("singleton_local_shards", False)
        entry = make_sharded_tensors_for_checkpoint(
            {f"{i}.weight": weight},
            "",
            {f"{i}.weight": self.partition_dim},
            offsets if singleton else (*offsets, (len(offsets), expert, experts)),
            tp_group=self.groups.expt_tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        replace_prefix_for_sharding(entry, f"{i}.", f"{expert}.{prefix}" if singleton else prefix)
        tensor = entry[f"{i}.weight"]
        tensor.replica_id = (*tensor.replica_id[:2], get_pg_rank(self.groups.expt_dp))
        return tensor


class ColumnParallelGroupedLinear(GroupedLinear):
    """Experts' first layer: split along the output."""

    partition_dim = 0


class RowParallelGroupedLinear(GroupedLinear):
    """Experts' second layer: split along the input."""

    partition_dim = 1
