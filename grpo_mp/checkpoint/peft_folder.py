"""Write adapters as a folder that peft loads: adapter_config.json and adapter_model.safetensors."""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from grpo_mp.checkpoint.describe import is_converted
from grpo_mp.checkpoint.hf_writer import incomplete_folder, replace_folder
from grpo_mp.checkpoint.manifest import CONVERSION_RECORD, SOURCE_FOLDER
from grpo_mp.config.lora_section import LoraConfig
from grpo_mp.files import read_json, sync_to_disk, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NOTE = "README.md"
BASE_NOTE = """The projections of the base model were in blockwise FP8 while these adapters learned beside them
(lora.base_dtype=fp8): float8_e4m3fn with a float32 factor for each block of 128 x 128, max|block| / 448, or as the base
model has them. On a base in another precision the model is not exactly the one that was trained.
"""
SAMPLE_BYTES = 4096
SAFETENSORS, DISTCP = WEIGHT_FILES = (".safetensors", ".distcp")
FILE_SAMPLES = 16  # of a file of weights that is not safetensors
OF_TENSORS = "tensors:"  # begins a digest with samples of every tensor; older ones have those of files alone
HEADER_LENGTH_BYTES, MAX_HEADER_BYTES = 8, 10**8  # of a safetensors file, as its library has them
READERS = 16  # files that are sampled at a time: the latency of a shared file system counts
PREFIX = "base_model.model."  # of every name


def adapter_config(
    lora: LoraConfig, base: Path, names: Iterable[str], expert_projections: Collection[str]
) -> dict[str, Any]:
    """Return what peft reads beside the weights. Pure.

    `names`: of adapters, such as `...q_proj.lora_A.weight`; `expert_projections`: of the model, with adapters or not.
    In transformers 5 the experts of a layer are one module, and peft takes every target that ends in the name of one of
    their projections for theirs: the same projections of dense layers and shared experts are named by their weights.
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


def base_of(model: Path) -> Path | None:
    """Return the folder onto which peft loads adapters of `model`: itself, or what it was converted from.

    None where a converted folder does not know that: peft loads none of its own.
    """
    if not is_converted(model):
        return model
    source = read_json(model / CONVERSION_RECORD).get(SOURCE_FOLDER)
    return Path(source) if isinstance(source, str) else None


def base_digest(folder: Path) -> str:
    """Return a digest of the weights of a folder, by samples of each of its files: adapters are for these alone.

    Of a safetensors file it reads the header, and of each tensor 4 KiB at the beginning, in the middle and at the end,
    or all of one of up to 12 KiB: 0.7 GB of the 91,991 tensors in DeepSeek-V3's 688 GB. Of another file it reads
    16 x 4 KiB. Raises OSError where a file cannot be read.
    """
    with ThreadPoolExecutor(READERS) as executor:
        parts = sorted(folder.glob(f"*/*{DISTCP}")) if is_converted(folder) else []
        digests = executor.map(_file_digest, [*_weight_files(folder), *parts])
        return OF_TENSORS + hashlib.sha256(b"".join(digests)).hexdigest()


def has_digest(folder: Path, digest: str) -> bool:
    """Return whether `base_digest`, of this version or of an older one, has made the digest of the folder's weights."""
    if digest.startswith(OF_TENSORS):
        return digest == base_digest(folder)
    former = hashlib.sha256()
    for file in _weight_files(folder):
        size = file.stat().st_size
        _add_samples(former, file, size, _samples_of_file(size))
    return digest == former.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_FILES)


def _file_digest(file: Path) -> bytes:
    size, digest = file.stat().st_size, hashlib.sha256()
    _add_samples(digest, file, size, _samples_of_tensors(file, size) or _samples_of_file(size))
    return digest.digest()


def _add_samples(digest: Any, file: Path, size: int, samples: Iterable[tuple[int, int]]) -> None:
    """Add a file's name, size and the bytes [start, stop) of each sample."""
    digest.update(f"{file.name} {size} ".encode())
    with file.open("rb", buffering=0) as stream:
        for start, stop in samples:
            digest.update(os.pread(stream.fileno(), stop - start, start))


def _samples_of_file(size: int) -> Iterator[tuple[int, int]]:
    for number in range(FILE_SAMPLES):
        start = max(0, size - SAMPLE_BYTES) * number // (FILE_SAMPLES - 1)
        yield start, start + SAMPLE_BYTES


def _samples_of_tensors(file: Path, size: int) -> list[tuple[int, int]]:
    """Return the header and samples of each tensor; none where the file is not safetensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
        if file.suffix != SAFETENSORS or length > min(size, MAX_HEADER_BYTES):
            return []
        try:
            header = json.loads(stream.read(length))
            offsets = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, TypeError, KeyError, AttributeError):
            return []
    data = HEADER_LENGTH_BYTES + length
    tensors = (_samples_of_tensor(data + start, data + stop) for start, stop in offsets)
    return [(0, data), *chain.from_iterable(tensors)]


def _samples_of_tensor(start: int, stop: int) -> list[tuple[int, int]]:
    if stop - start <= 3 * SAMPLE_BYTES:
        return [(start, stop)]
    firsts = (start, (start + stop - SAMPLE_BYTES) // 2, stop - SAMPLE_BYTES)
    return [(first, first + SAMPLE_BYTES) for first in firsts]


def write_peft(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    model: Path,
    lora: LoraConfig,
    expert_projections: Collection[str] = (),
) -> None:
    """Write adapters of `model` by their Hugging Face names, all of which are held at a time.

    `expert_projections`: as of `adapter_config`. The folder appears under its name once it is complete. Raises OSError
    where the disk does not take it.
    """
    own, incomplete = dict(tensors), incomplete_folder(folder)
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    named = {PREFIX + name: tensor.contiguous() for name, tensor in own.items()}
    try:
        save_file(named, incomplete / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # is no OSError
        raise OSError(f"{WEIGHTS}: {error}") from error
    write_json(incomplete / CONFIG, adapter_config(lora, base_of(model) or model, own, expert_projections))
    if lora.base_dtype:
        (incomplete / NOTE).write_text(BASE_NOTE)
    for path in (*incomplete.iterdir(), incomplete):
        sync_to_disk(path)
    replace_folder(incomplete, folder)
