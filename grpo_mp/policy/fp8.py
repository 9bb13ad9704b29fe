"""Checks of FP8 training (training.fp8_format)."""

from collections.abc import Iterable

from grpo_mp.config.sections import LayoutConfig, TrainingConfig
from grpo_mp.distributed.shards import tp_size
from grpo_mp.models.mapping import Param
from grpo_mp.utils.errors import UserError

# Both sizes of a matrix must be multiples of this: TransformerEngine's assert_dim_for_fp8_exec, MXFP8's block size.
FEATURES = {"blockwise": 16, "tensorwise": 16, "mxfp8": 32}
BEYOND_MXFP8 = 12.0  # compute capability from which TransformerEngine has no MXFP8 (its quantization.py)
CAPABILITY = {  # least compute capability of each recipe, as TransformerEngine checks it
    "blockwise": (9.0, "H100 or newer"),
    "tensorwise": (8.9, "L40 or newer"),
    "mxfp8": (10.0, "B200 or newer"),
}


def check_fp8(
    training: TrainingConfig, dtype: str, layout: LayoutConfig, params: Iterable[Param], capability: float | None
) -> None:
    """Check that the device, the dtype and the sizes of a rank's linear layers allow `training.fp8_format`.

    `capability`: compute capability of the GPU; None on a CPU, which supports the blockwise recipe only.
    """
    if training.fp8_format is None:
        return
    recipe, setting = training.fp8_recipe, f"training.fp8_format={training.fp8_format}"
    least, gpus = CAPABILITY[recipe]
    if capability is None and recipe != "blockwise":
        raise UserError(f"training.fp8_recipe={recipe} needs GPUs ({gpus}): on a CPU set fp8_recipe=blockwise")
    if capability is None and training.megatron_args.get("first_last_layers_bf16"):
        raise UserError(f"{setting} on a CPU is of all layers: leave out training.megatron_args.first_last_layers_bf16")
    if capability is not None and capability < least:
        raise UserError(
            f"training.fp8_recipe={recipe} needs GPUs of compute capability {least:g} ({gpus}), these have "
            f"{capability:g}: set training.fp8_format=null"
        )
    if capability is not None and recipe == "mxfp8" and capability >= BEYOND_MXFP8:
        raise UserError(f"training.fp8_recipe=mxfp8: TransformerEngine has none for compute capability {capability:g}")
    if capability is not None and dtype != "bfloat16":
        raise UserError(f"{setting} needs model.dtype=bfloat16 on a GPU, not {dtype}")
    for param in params:
        if param.is_projection:
            _check_sizes(param, tp_size(param, layout), FEATURES[recipe], setting)


def _check_sizes(param: Param, parts: int, features: int, setting: str) -> None:
    local = param.local_shape(parts)
    if any(size % features for size in local):
        raise UserError(
            f"{setting} needs matrices whose sizes on a rank are multiples of {features}, {param.name} has {local} "
            f"with {parts} tensor-parallel parts: choose a smaller layout.tensor or layout.expert_tensor"
        )
