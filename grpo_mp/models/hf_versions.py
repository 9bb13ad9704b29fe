"""Names that transformers 4 and 5 give to the same setting of a config.json.

transformers 5 reads the names of 4; transformers 4 passes over those of 5 and takes its defaults without a word: a
wrong rope_theta, 128 experts. A config that is written here says both.
"""

from collections.abc import Mapping
from typing import Any

from grpo_mp.models.families import FAMILIES

# Model types that transformers computes under another name.
TRANSFORMERS_NAMES = {name: family.transformers_type for name, family in FAMILIES.items() if family.transformers_type}
TOP_LEVEL_ROPE = ("rope_theta", "partial_rotary_factor")  # beside rope_scaling in 4, in rope_parameters in 5


def add_transformers_4_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the names of transformers 4 beside those of 5; names that it has keep their values.

    Except rope_theta and partial_rotary_factor: transformers 5 reads those of rope_parameters, so they win.
    """
    older: dict[str, Any] = {}
    top_level: dict[str, Any] = {}
    rope = None if config.get("rope_scaling") else config.get("rope_parameters")
    if isinstance(rope, dict):
        top_level = {name: rope[name] for name in TOP_LEVEL_ROPE if name in rope}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            older["rope_scaling"] = {name: value for name, value in rope.items() if name not in TOP_LEVEL_ROPE}
    family = FAMILIES.get(str(config.get("model_type")))
    older |= {name: config[newer] for name, newer in (family.older_names if family else ()) if newer in config}
    if "dtype" in config:
        older["torch_dtype"] = config["dtype"]
    return dict(config) | top_level | {name: value for name, value in older.items() if config.get(name) is None}
