"""How many bytes the trainer keeps per parameter: weights, gradients, optimizer, host copies."""

from dataclasses import dataclass

from grpo_mp.config import Settings

DTYPE_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "uint8": 1, "fp8": 1}


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes per parameter. Optimizer state is sharded over data-parallel ranks; the rest is not."""

    weights: int
    gradients: int
    optimizer: int  # main weights and moments on the device
    fp32_gradients: int = 0  # copied for an update, of the rank's shard
    host_optimizer: int = 0  # kept and updated on the host
    host_copies: int = 0  # of weights (and gradients) kept on the host
    fp32_moments: int = 0  # of one parameter at a time, copied on the device while they are saved


def bytes_per_parameter(settings: Settings) -> BytesPerParameter:
    """Return what this trainer keeps: distributed Adam, offloaded between phases; one host copy of the weights.

    In float32 the optimizer works on the model's own weights, and nothing is offloaded.
    """
    megatron = settings.training.megatron_args
    if settings.model.dtype == "float32":
        return BytesPerParameter(weights=4, gradients=4, optimizer=8)
    reduce_in_fp32 = megatron.get("grad_reduce_in_fp32", True)
    precision_aware = bool(megatron.get("use_precision_aware_optimizer"))
    # Transformer Engine's Adam keeps of a float32 main weight only the half that its bfloat16 weight lacks.
    main_weight = DTYPE_BYTES[str(megatron.get("main_params_dtype", "float32"))]
    main_weight = 2 if megatron.get("store_param_remainders", True) and main_weight == 4 else main_weight
    moment_bytes = [DTYPE_BYTES[str(megatron.get(f"exp_avg{suffix}_dtype", "float32"))] for suffix in ("", "_sq")]
    return BytesPerParameter(
        weights=2,
        gradients=4 if reduce_in_fp32 else 2,
        optimizer=main_weight + sum(moment_bytes) if precision_aware else 12,
        fp32_gradients=0 if reduce_in_fp32 or precision_aware else 4,  # Megatron hands Adam float32 gradients
        host_copies=2,
        fp32_moments=4 * sum(size < 4 for size in moment_bytes) if precision_aware else 0,
    )
