"""Write a Hugging Face folder (numbered shards, an index, config and tokenizer), or adapters as a peft folder."""

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from grpo_mp.checkpoint.hf_reader import INDEX, SINGLE_FILE
from grpo_mp.checkpoint.stacked_experts import stack_adapters
from grpo_mp.config.sections import LoraConfig
from grpo_mp.models.families import Family, family_of
from grpo_mp.models.fp8 import BLOCK
from grpo_mp.models.hf_config import QUANTIZATION_CONFIG, HfConfig
from grpo_mp.utils.files import sync_to_disk, write_json
from grpo_mp.utils.splitting import split_by_size

SHARD_BYTES = 2**30  # largest file; a writer has one shard being written, one being filled, and one tensor in memory
# Files that are copied with the weights: configs, tokenizer, templates, processors, code and licences. All others are
# not copied, such as weights in other formats, adapters and training state.
AUX_FILES = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("*.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("*.py", "*.md", "LICENSE*", "NOTICE*"),
)
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
UNQUANTIZED = "modules_to_not_convert"  # key in the quantization_config
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # of every tensor name in peft's files


def begin_hf(folder: Path) -> None:
    """Create an empty folder for the shards, NAME.incomplete, to be renamed when all are written."""
    incomplete = incomplete_folder(folder)
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], writer: int, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write tensors to shards of at most `shard_bytes`, or one tensor; return the shards' temporary file names.

    One shard is written while the next is filled from `tensors`, so at most two shards and one tensor are in memory.
    `writer`: number of this writer; several may run at the same time.
    """
    shards: list[str] = []
    with ThreadPoolExecutor(1, thread_name_prefix="export") as pool:
        writing: Future[str] | None = None
        contiguous = ((name, tensor.contiguous()) for name, tensor in tensors)
        for number, shard in enumerate(split_by_size(contiguous, lambda item: item[1].nbytes, shard_bytes)):
            if writing:
                shards.append(writing.result())
            writing = pool.submit(_write_shard, folder, f"shard-{writer}-{number}", shard)
        if writing:
            shards.append(writing.result())
    return shards


def _write_shard(folder: Path, file: str, tensors: list[tuple[str, torch.Tensor]]) -> str:
    path = incomplete_folder(folder) / file
    save_tensors(path, dict(tensors))
    sync_to_disk(path)  # here, because only the machine that wrote the file has it in its page cache
    tensors.clear()
    return file


def save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors raises it instead of OSError, for example if the disk is full
        raise OSError(f"{file.name}: {error}") from error


def fp8_config(hf: HfConfig) -> dict[str, Any]:
    """Return the quantization_config of a model in blockwise FP8, with the names of the modules that stay wide.

    These are the matrices in layers that are not quantized, as in FP8 releases of Qwen, and what is outside the policy.
    """
    family = family_of(hf)
    if family.stacks_experts:
        raise hf.error(f"nothing reads {hf.model_type} in blockwise FP8: leave quantization out")
    wide = [
        name.removesuffix(".weight")
        for param in family.params(hf).values()
        if param.layer is not None
        for name, shape, quantized in zip(param.hf, param.shapes, param.in_fp8, strict=True)
        if len(shape) == 2 and not quantized
    ]
    return FP8_CONFIG | {UNQUANTIZED: ["lm_head", *wide, *(prefix.rstrip(".") for prefix in family.outside(hf))]}


def complete_hf(folder: Path, shards: Sequence[str], like: Path, quantization: Mapping[str, Any] | None = None) -> None:
    """Complete the folder: number the shards of all writers, write the index, copy the auxiliary files, rename it.

    `like`: folder of config, tokenizer and other auxiliary files; `quantization`: see `copy_aux_files`.
    """
    incomplete = incomplete_folder(folder)
    files = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    for shard, file in zip(shards, files, strict=True):
        (incomplete / shard).rename(incomplete / file)
    write_index(incomplete, files)
    copy_aux_files(like, incomplete, quantization)
    for other in set(incomplete.rglob("*")) - {incomplete / file for file in files}:
        sync_to_disk(other)
    sync_to_disk(incomplete)
    replace_folder(incomplete, folder)


def replace_folder(complete: Path, folder: Path) -> None:
    """Rename a complete folder to `folder`, and delete the folder that had this name before."""
    former = folder.with_name(folder.name + ".former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    complete.rename(folder)
    sync_to_disk(folder.parent)
    shutil.rmtree(former, ignore_errors=True)


def incomplete_folder(folder: Path) -> Path:
    """Return the path that `folder` has until it is complete: NAME.incomplete."""
    return folder.with_name(folder.name + ".incomplete")


def shard_name(number: int, count: int) -> str:
    """Return the file name of shard `number` (from 1) of `count`."""
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, files: Sequence[str]) -> None:
    """Write the index of a folder's weight files, from their headers; a single file needs none."""
    if len(files) == 1:
        return
    weight_map: dict[str, str] = {}
    total = 0
    for file in files:
        with (folder / file).open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        weight_map |= dict.fromkeys(header, file)
        total += max(entry["data_offsets"][1] for entry in header.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def copy_aux_files(like: Path, folder: Path, quantization: Mapping[str, Any] | None = None) -> None:
    """Copy config, tokenizer, chat templates, code and licence from `like` to `folder`.

    The new config.json has no quantization_config, or that of `like` if it is FP8, or else `quantization`.
    """
    for file in (file for pattern in AUX_FILES for file in like.glob(pattern) if file.is_file()):
        copy = folder / file.relative_to(like)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(file, copy)
    config_file = folder / "config.json"
    config: dict[str, Any] = json.loads(config_file.read_text()) if config_file.is_file() else {}
    parts = (config, config.get("text_config") or {})
    stored: dict[str, Any] = next((part[QUANTIZATION_CONFIG] for part in parts if part.get(QUANTIZATION_CONFIG)), {})
    if config and (stored.get("quant_method") != "fp8" if quantization else stored):
        for part in parts:
            part.pop(QUANTIZATION_CONFIG, None)
        config |= {QUANTIZATION_CONFIG: quantization} if quantization else {}
        config_file.write_text(json.dumps(config, indent=2))


def adapter_config(
    lora: LoraConfig, base: Path, names: Iterable[str], family: Family, expert_projections: Collection[str]
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    `names`: tensor names of the adapters, such as `...q_proj.lora_A.weight`; `expert_projections`: names of the
    projections in the model's experts, such as `up_proj`. From these names peft derives the parameters of all experts
    together; for a family with `peft_names` the file has what peft would derive.
    In transformers 5 all experts of a layer are one module, and peft applies a target module with the name of an expert
    projection to it, too. So projections of these names in dense layers and shared experts are listed as
    target_parameters, by their weights.
    """
    modules = {name.split(".lora_")[0] for name in names}
    by_weight = {module for module in modules if ".experts." not in module and _leaf(module) in expert_projections}
    by_name = {_leaf(module) for module in modules - by_weight}
    if lora.targets is not None:
        by_name = {target for target in lora.targets if target in by_name or _leaf(target) not in expert_projections}
    renamed = family.peft_names or {}
    parameters = {
        ".".join(renamed.get(part, part) for part in (*module.split(".")[-2:], "weight")) for module in by_weight
    }
    patterns: dict[str, Any] = {}
    if family.peft_names is not None:
        by_name = {name for name in by_name if _leaf(name) not in expert_projections}
        chosen = {_leaf(module) for module in modules if ".experts." in module}
        fused = {"down_proj" if name == "down_proj" else "gate_up_proj" for name in chosen}
        parameters |= {f"experts.{name}" for name in fused}
        patterns = {
            key: {r".*\.gate_up_proj": 2 * value}
            for key, value in (("rank_pattern", lora.rank), ("alpha_pattern", lora.alpha))
            if "gate_up_proj" in fused
        }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(by_name),
        "target_parameters": sorted(parameters) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    } | patterns


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def write_peft(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    model: Path,
    lora: LoraConfig,
    family: Family,
    expert_projections: Collection[str] = (),
) -> None:
    """Write a peft folder, which gets its name only when it is complete.

    `tensors`: adapters by Hugging Face name; `model`: folder of the base weights; `family`: of the model;
    `expert_projections`: see `adapter_config`.
    """
    own = dict(tensors)
    incomplete = incomplete_folder(folder)
    begin_hf(folder)
    written = stack_adapters(own) if family.stacks_experts else own
    save_tensors(
        incomplete / ADAPTER_WEIGHTS, {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in written.items()}
    )
    write_json(incomplete / ADAPTER_CONFIG, adapter_config(lora, model, own, family, expert_projections))
    for path in (*incomplete.iterdir(), incomplete):
        sync_to_disk(path)
    replace_folder(incomplete, folder)
