"""Write adapters as a folder that peft loads: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_mp.checkpoint.hf_writer import begin_hf, incomplete_folder, replace_folder, save_tensors
from grpo_mp.config.sections import LoraConfig
from grpo_mp.utils.files import sync_to_disk, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor name in peft's files


def adapter_config(
    lora: LoraConfig, base: Path, names: Iterable[str], expert_projections: Collection[str]
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    `names`: tensor names of the adapters, such as `...q_proj.lora_A.weight`; `expert_projections`: names of the
    projections in the model's experts, such as `up_proj`.
    In transformers 5 all experts of a layer are one module, and peft applies a target module with the name of an expert
    projection to it, too. So projections of these names in dense layers and shared experts are listed as
    target_parameters, by their weights.
    """
    modules = {name.split(".lora_")[0] for name in names}
    by_weight = {module for module in modules if ".experts." not in module and _leaf(module) in expert_projections}
    by_name = {_leaf(module) for module in modules - by_weight}
    if lora.targets is not None:
        by_name = {target for target in lora.targets if target in by_name or _leaf(target) not in expert_projections}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(by_name),
        "target_parameters": sorted({f"{'.'.join(module.split('.')[-2:])}.weight" for module in by_weight}) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def write_peft(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    model: Path,
    lora: LoraConfig,
    expert_projections: Collection[str] = (),
) -> None:
    """Write a peft folder, which gets its name only when it is complete.

    `tensors`: adapters by Hugging Face name; `model`: folder of the base weights; `expert_projections`: see
    `adapter_config`.
    """
    own, incomplete = dict(tensors), incomplete_folder(folder)
    begin_hf(folder)
    save_tensors(incomplete / WEIGHTS, {PREFIX + name: tensor.contiguous() for name, tensor in own.items()})
    write_json(incomplete / CONFIG, adapter_config(lora, model, own, expert_projections))
    for path in (*incomplete.iterdir(), incomplete):
        sync_to_disk(path)
    replace_folder(incomplete, folder)
