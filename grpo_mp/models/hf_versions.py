"""Names that transformers 4 and 5 give to the same setting of a config.json.

transformers 5 reads the names of 4; transformers 4 passes over those of 5 and takes its defaults without a word: a
wrong rope_theta, 128 experts. A config that is written here says both.
"""

from collections.abc import Mapping
from typing import Any

EXPERTS = ("num_experts", "num_local_experts")  # of Qwen3-MoE: its name in 4, in 5
TRANSFORMERS_NAMES = {"kimi_k2": "deepseek_v3"}  # model types that transformers computes under another name
OUTSIDE = ("rope_theta", "partial_rotary_factor")  # stand beside rope_scaling in 4, in rope_parameters in 5


def in_both_forms(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the names of transformers 4 beside those of 5; what it says already stays.

    But for what rope_parameters says: there transformers 5 looks first, and may leave another value outside.
    """
    older: dict[str, Any] = {}
    outside: dict[str, Any] = {}
    rope = None if config.get("rope_scaling") else config.get("rope_parameters")
    if isinstance(rope, dict):
        outside = {name: rope[name] for name in OUTSIDE if name in rope}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            older["rope_scaling"] = {name: value for name, value in rope.items() if name not in OUTSIDE}
    if config.get("model_type") == "qwen3_moe" and EXPERTS[1] in config:
        older[EXPERTS[0]] = config[EXPERTS[1]]
    if "dtype" in config:
        older["torch_dtype"] = config["dtype"]
    return dict(config) | outside | {name: value for name, value in older.items() if config.get(name) is None}
