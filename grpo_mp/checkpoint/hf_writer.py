"""Write a Hugging Face folder: numbered shards of bounded size, an index, config and tokenizer."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_mp.checkpoint.aux_files import copy_aux_files
from grpo_mp.checkpoint.hf_reader import INDEX, SINGLE_FILE


def write_hf(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], like: Path, shard_bytes: int = 4 * 2**30
) -> None:
    """Write tensors as numbered shards with an index; everything but weights is copied from `like`.

    The folder appears under its name only when it is complete.
    """
    incomplete = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    shards: list[tuple[str, ...]] = []  # names of the tensors of each
    total_bytes = 0
    for shard in _split_by_bytes(tensors, shard_bytes):
        save_file(shard, incomplete / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(tuple(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # free its memory before the next one is collected
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = shard_name(index + 1, len(shards))
        (incomplete / f"shard-{index}").rename(incomplete / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) != 1:
        write_index(incomplete, weight_map, total_bytes)
    copy_aux_files(like, incomplete)
    shutil.rmtree(folder, ignore_errors=True)
    incomplete.rename(folder)


def shard_name(number: int, count: int) -> str:
    """Return the file name of a shard; numbers begin at 1."""
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of the shards: the file of each tensor, and the bytes of all."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _split_by_bytes(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors by name, in order, in dictionaries of at most `max_bytes` or one tensor."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(other.nbytes for other in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    if shard:
        yield shard
