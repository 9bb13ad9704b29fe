"""Write adapters as a folder that peft loads: adapter_config.json and adapter_model.safetensors."""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.hf_writer import incomplete_folder, replace_folder
from grpo_mp.config.lora_section import LoraConfig
from grpo_mp.files import sync_to_disk, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NOTE = "README.md"
BASE_NOTE = """The projections of the base model were in blockwise FP8 while these adapters learned beside them
(lora.base_dtype=fp8): float8_e4m3fn with a float32 factor for each block of 128 x 128, max|block| / 448, or as the base
model has them. On a base in another precision the model is not exactly the one that was trained.
"""
SAMPLES, SAMPLE_BYTES = 16, 4096  # of a file of weights
PREFIX = "base_model.model."  # of every name


def adapter_config(lora: LoraConfig, base: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return what peft reads beside the weights; `names`: of adapters, such as `...q_proj.lora_A.weight`. Pure.

    In transformers 5 the experts of a layer are one module, and peft takes every target of the name of one of their
    projections for theirs: the same projections of dense layers and shared experts are named by their weights.
    """
    modules = {name.split(".lora_")[0] for name in names}
    of_experts = {_leaf(module) for module in modules if ".experts." in module}
    beside = {".".join(module.split(".")[-2:]) for module in modules if ".experts." not in module}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({_leaf(module) for module in modules} if lora.targets is None else lora.targets),
        "target_parameters": sorted(f"{module}.weight" for module in beside if _leaf(module) in of_experts) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def base_digest(folder: Path) -> str:
    """Return a digest of the weights of a folder, by samples of each of its files: adapters are for these alone."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".distcp")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def write_peft(folder: Path, tensors: Iterable[tuple[str, Tensor]], base: Path, lora: LoraConfig) -> None:
    """Write adapters by their Hugging Face names, all of which are held at a time.

    The folder appears under its name once it is complete. Raises OSError where the disk does not take it.
    """
    own, incomplete = dict(tensors), incomplete_folder(folder)
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    named = {PREFIX + name: tensor.contiguous() for name, tensor in own.items()}
    try:
        save_file(named, incomplete / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # is no OSError
        raise OSError(f"{WEIGHTS}: {error}") from error
    write_json(incomplete / CONFIG, adapter_config(lora, base, own))
    if lora.base_dtype:
        (incomplete / NOTE).write_text(BASE_NOTE)
    for path in (*incomplete.iterdir(), incomplete):
        sync_to_disk(path)
    replace_folder(incomplete, folder)
