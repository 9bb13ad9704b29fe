"""Bytes per parameter in memory and in checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIMIZER_PIECE_BYTES = 2**28  # of host state that an update copies to the device at a time; larger is no faster
DTYPE_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "uint8": 1, "fp8": 1}


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes per parameter. Optimizer state is sharded over data-parallel ranks; the rest is not."""

    weights: int
    gradients: int
    optimizer: int  # main weights and moments on the device
    fp32_gradients: int = 0  # copy of the rank's gradient shard that an update makes
    host_optimizer: int = 0  # main weights and moments that are always on the host
    host_copies: int = 0  # copy of the weights in host memory
    saved_reference: int = 0  # weights of a reference model that is updated, in checkpoints

    @property
    def saved(self) -> int:
        """Return the bytes per parameter in a checkpoint, which stores every tensor in its dtype."""
        return self.weights + self.saved_reference + self.saved_state

    @property
    def saved_state(self) -> int:
        """Return the bytes per parameter of optimizer state in a checkpoint."""
        return self.optimizer + self.host_optimizer


def bytes_per_parameter(
    dtype: str, megatron_args: Mapping[str, Any], offload: str = "step", updated_reference: bool = False
) -> BytesPerParameter:
    """Return the bytes per parameter of a policy with distributed Adam and one host copy of the weights.

    In float32 the model's weights are Adam's main weights, and nothing is offloaded. `offload`: optimizer.offload;
    `updated_reference`: checkpoints have a reference model of their own.
    """
    if dtype == "float32":
        return BytesPerParameter(weights=4, gradients=4, optimizer=8, saved_reference=4 * updated_reference)
    reduce_in_fp32 = megatron_args.get("grad_reduce_in_fp32", True)
    gradients = 4 if reduce_in_fp32 else 2
    on_host = offload == "host"
    precision_aware = bool(megatron_args.get("use_precision_aware_optimizer"))
    # TransformerEngine's Adam stores only the half of a float32 main weight that the bfloat16 weight lacks.
    main_weight = DTYPE_BYTES[str(megatron_args.get("main_params_dtype", "float32"))]
    if dtype == "bfloat16" and megatron_args.get("store_param_remainders", True) and main_weight == 4:
        main_weight = 2
    moment_bytes = [DTYPE_BYTES[str(megatron_args.get(f"exp_avg{suffix}_dtype", "float32"))] for suffix in ("", "_sq")]
    state = main_weight + sum(moment_bytes) if precision_aware else 12
    return BytesPerParameter(
        weights=2,
        gradients=gradients,
        optimizer=0 if on_host else state,
        host_optimizer=state if on_host else 0,
        fp32_gradients=0
        if reduce_in_fp32 or precision_aware or on_host
        else 4,  # Megatron copies the gradients to float32 for Adam
        host_copies=2,
        saved_reference=2 * updated_reference,
    )
