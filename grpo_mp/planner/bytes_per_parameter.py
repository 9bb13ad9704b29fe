"""In how many bytes a trainer keeps a parameter, where, and what it keeps twice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mp.config import Settings

BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "uint8": 1, "fp8": 1}


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes per parameter. What the optimizer holds is divided over data parallel ranks; the rest is not."""

    weights: int
    gradients: int
    optimizer: int  # main weights and moments on the device
    update: int = 0  # what an update holds for a moment beside them
    host_optimizer: int = 0  # held and updated on the host
    host_copies: int = 0  # of weights (and gradients) kept on the host
    saved: int = 0  # float32 copies of one parameter's moments at a time, on the device, while they are saved


def bytes_per_parameter(settings: Settings) -> BytesPerParameter:
    """Of this trainer: distributed Adam, moved to the host between phases; one host copy of the weights.

    With full precision the optimizer works on the model's own weights, and nothing moves.
    """
    megatron = settings.optimizer.megatron
    if settings.model.dtype == "float32":
        return BytesPerParameter(weights=4, gradients=4, optimizer=8)
    reduce_in_fp32 = megatron.get("grad_reduce_in_fp32", True)
    aware = bool(megatron.get("use_precision_aware_optimizer"))
    return BytesPerParameter(
        weights=2,
        gradients=4 if reduce_in_fp32 else 2,
        optimizer=_aware(megatron) if aware else 12,
        update=0 if reduce_in_fp32 or aware else 4,  # Megatron hands Adam float32 gradients
        host_copies=2,
        saved=4 * sum(BYTES[moment] < 4 for moment in _moments(megatron)) if aware else 0,
    )


def _aware(megatron: Mapping[str, Any]) -> int:
    """Transformer Engine's Adam keeps of a float32 main weight only the half that its bfloat16 weight lacks."""
    main = str(megatron.get("main_params_dtype", "float32"))
    remainders = megatron.get("store_param_remainders", True) and BYTES[main] == 4
    return (2 if remainders else BYTES[main]) + sum(BYTES[moment] for moment in _moments(megatron))


def _moments(megatron: Mapping[str, Any]) -> tuple[str, str]:
    first, second = (str(megatron.get(f"exp_avg{kind}_dtype", "float32")) for kind in ("", "_sq"))
    return first, second
