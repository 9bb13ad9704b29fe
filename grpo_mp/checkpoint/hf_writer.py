"""Write a Hugging Face folder: numbered shards of bounded size, an index, config and tokenizer."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_mp.checkpoint.aux_files import copy_aux_files
from grpo_mp.checkpoint.hf_reader import INDEX


def write_hf(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], like: Path, shard_bytes: int = 4 * 2**30
) -> None:
    """Write tensors as numbered shards with an index; everything but weights is copied from `like`.

    The folder appears under its name only when it is complete.
    """
    incomplete = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    shards = _write_shards(incomplete, tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, (file, sizes) in enumerate(shards, start=1):
        name = shard_name(number, len(shards))
        file.rename(incomplete / name)
        weight_map |= dict.fromkeys(sizes, name)
    if len(shards) != 1:
        write_index(incomplete, weight_map, sum(sum(sizes.values()) for _, sizes in shards))
    copy_aux_files(like, incomplete)
    shutil.rmtree(folder, ignore_errors=True)
    incomplete.rename(folder)


def shard_name(number: int, count: int) -> str:
    """Return the file name of a shard; numbers begin at 1."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of the shards: the file of each tensor, and the bytes of all."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> list[tuple[Path, dict[str, int]]]:
    """Write shards under temporary names. Returns each file with its tensors' names and bytes."""
    shards: list[tuple[Path, dict[str, int]]] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if pending:
            file = folder / f"shard-{len(shards):05d}"
            save_file(pending, file, metadata={"format": "pt"})
            shards.append((file, {name: tensor.nbytes for name, tensor in pending.items()}))
            pending.clear()

    for name, tensor in tensors:
        if sum(other.nbytes for other in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor.contiguous()
    flush()
    return shards
