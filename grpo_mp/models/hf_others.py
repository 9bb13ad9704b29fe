"""What stands beside the weights in a Hugging Face folder: config, tokenizer, template, licence."""

import json
import shutil
from pathlib import Path
from typing import Any

from grpo_mp.models.fp8 import BLOCK
from grpo_mp.models.manifest import RECORD

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".incomplete")
RECORDS = (".metadata", "metadata.json", "common.pt", "manifest.json", RECORD)
QUANTISED = "quantization_config"


def copy_others(like: Path, folder: Path, fp8: bool = False) -> None:
    """Copy every file that is neither weights nor a record of a checkpoint.

    config.json says then whether the weights are blockwise FP8; it is copied as it is where it says so already.
    """
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name not in RECORDS:
            shutil.copy2(file, folder / file.name)
    if (folder / "config.json").is_file():
        _state_fp8(folder / "config.json", fp8)


def _state_fp8(file: Path, fp8: bool) -> None:
    config: dict[str, Any] = json.loads(file.read_text())
    if fp8 == (QUANTISED in config):
        return
    config.pop(QUANTISED, None)
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    file.write_text(json.dumps(config | ({QUANTISED: blocks} if fp8 else {}), indent=2))
