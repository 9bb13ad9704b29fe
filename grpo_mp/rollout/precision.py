"""Precision of the engines: blockwise FP8 or not, and SGLang's arguments where the model's folder differs. Pure.

An engine that quantizes weights as it loads them cannot take later ones; one whose model *is* blockwise FP8 takes new
bytes and scales at every weight sync. So the model is declared to be that, and starts with random weights: the first
sync sends them all.
"""

import json
from collections.abc import Mapping
from typing import Any

from grpo_mp.checkpoint.hf_writer import FP8_CONFIG, QUANTIZATION_CONFIG
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.errors import UserError

OVERRIDES = "json_model_override_args"


def engine_uses_fp8(args: Mapping[str, Any], hf: HfConfig, cpu: bool) -> bool:
    """Decide by engine.args.quantization, else by the folder. Raises UserError for what a weight sync cannot serve."""
    quantization = args.get("quantization")
    if quantization not in (None, "fp8"):
        raise UserError(
            f"engine.args.quantization={quantization}: weights are sent as they are trained or in blockwise FP8: "
            "set fp8, or leave it out"
        )
    if quantization and cpu:
        raise UserError("engine.args.quantization=fp8: engines compute in FP8 on GPUs only: leave it out")
    return not cpu and (quantization == "fp8" or is_fp8_checkpoint(hf))


def is_fp8_checkpoint(hf: HfConfig) -> bool:
    """Return whether the folder's weights are blockwise FP8."""
    return bool(hf.get(QUANTIZATION_CONFIG))


def precision_arguments(args: Mapping[str, Any], hf: HfConfig, cpu: bool) -> dict[str, Any]:
    """Return ServerArgs that make an engine compute as `engine_uses_fp8` says where the folder holds something else.

    With them it cannot read the folder's weights.
    """
    fp8 = engine_uses_fp8(args, hf, cpu)
    if fp8 == is_fp8_checkpoint(hf):
        return {}
    overrides = json.loads(args.get(OVERRIDES) or "{}") | {QUANTIZATION_CONFIG: FP8_CONFIG if fp8 else None}
    return {OVERRIDES: json.dumps(overrides)}
