"""What stands beside the weights in a Hugging Face folder: config, tokenizer, template, licence."""

import json
import shutil
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.manifest import RECORD
from grpo_mp.models.fp8 import BLOCK
from grpo_mp.models.hf_versions import in_both_forms

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".incomplete")
RECORDS = (".metadata", "metadata.json", "common.pt", "manifest.json", RECORD)
QUANTISED = "quantization_config"
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def copy_aux_files(like: Path, folder: Path, fp8: bool = False) -> None:
    """Copy every file that is neither weights nor a record of a checkpoint.

    config.json says then whether the weights are blockwise FP8, and what it says in the names of transformers 5 in
    those of 4, too; it is copied as it is where it says so already.
    """
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name not in RECORDS:
            shutil.copy2(file, folder / file.name)
    if (folder / "config.json").is_file():
        _complete(folder / "config.json", fp8)


def _complete(file: Path, fp8: bool) -> None:
    held: dict[str, Any] = json.loads(file.read_text())
    config = in_both_forms(held)
    if fp8 != (QUANTISED in config):
        config.pop(QUANTISED, None)
        config |= {QUANTISED: BLOCKS} if fp8 else {}
    if config != held:
        file.write_text(json.dumps(config, indent=2))
