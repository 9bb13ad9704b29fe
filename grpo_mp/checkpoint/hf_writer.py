"""Write a Hugging Face folder: numbered shards of bounded size, an index, config and tokenizer."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_mp.checkpoint.aux_files import copy_aux_files
from grpo_mp.checkpoint.hf_reader import INDEX


def write_hf(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], like: Path, shard_bytes: int = 4 * 2**30
) -> None:
    """Write tensors as numbered shards with an index; everything but weights is copied from `like`.

    The result appears under its name only when it is whole.
    """
    incomplete = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    files = _write_shards(incomplete, tensors, shard_bytes)
    _number_shards(incomplete, files)
    copy_aux_files(like, incomplete)
    shutil.rmtree(folder, ignore_errors=True)
    incomplete.rename(folder)


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> list[tuple[Path, dict[str, int]]]:
    files: list[tuple[Path, dict[str, int]]] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if pending:
            file = folder / f"shard-{len(files):05d}"
            save_file(pending, file, metadata={"format": "pt"})
            files.append((file, {name: tensor.nbytes for name, tensor in pending.items()}))
            pending.clear()

    for name, tensor in tensors:
        if sum(other.nbytes for other in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor.contiguous()
    flush()
    return files


def _number_shards(folder: Path, files: list[tuple[Path, dict[str, int]]]) -> None:
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    total = 0
    for number, (file, sizes) in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(folder / name)
        weight_map |= dict.fromkeys(sizes, name)
        total += sum(sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
