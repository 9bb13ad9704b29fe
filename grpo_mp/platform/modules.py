"""CPU modules with TransformerEngine's interface and parameter names.

A model built from Megatron's TransformerEngine spec has the same parameters on a CPU as on a GPU, such as
`linear_qkv.layer_norm_weight` and `experts.linear_fc1.weight3`: checkpoints and weight maps need one form.
Import megatron.core first: it loads this module itself (see patches).
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient Megatron sums over tensor ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        _check_norm(config)
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self.weight, sequence_parallel=config.sequence_parallel)


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
        x = F.rms_norm(x, (x.size(-1),), self.layer_norm_weight, self.config.layernorm_epsilon)
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
        pieces = zip(x.split(splits), self.parameters(), strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in pieces]), None

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
