"""The files beside the weights in a Hugging Face folder: config, tokenizer, template, licence."""

import json
import shutil
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.manifest import CONVERSION_RECORD
from grpo_mp.models.fp8 import BLOCK
from grpo_mp.models.hf_versions import add_transformers_4_names

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".incomplete")
CHECKPOINT_FILES = (".metadata", "metadata.json", "common.pt", "manifest.json", CONVERSION_RECORD)
QUANTISED = "quantization_config"
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def copy_aux_files(like: Path, folder: Path, fp8: bool = False) -> None:
    """Copy every file that is neither weights nor a record of a checkpoint.

    config.json then says whether the weights are blockwise FP8, and uses the names of transformers 4 beside those of
    5; it is copied as it is where it does so already.
    """
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name not in CHECKPOINT_FILES:
            shutil.copy2(file, folder / file.name)
    config_file = folder / "config.json"
    if not config_file.is_file():
        return
    original: dict[str, Any] = json.loads(config_file.read_text())
    config = add_transformers_4_names(original)
    if fp8 != (QUANTISED in config):
        config.pop(QUANTISED, None)
        config |= {QUANTISED: FP8_CONFIG} if fp8 else {}
    if config != original:
        config_file.write_text(json.dumps(config, indent=2))
