"""Write a Hugging Face folder: numbered shards of bounded size, an index, config and tokenizer."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from grpo_mp.checkpoint.hf_reader import INDEX, SINGLE_FILE
from grpo_mp.models.families import add_transformers_4_names
from grpo_mp.models.fp8 import BLOCK
from grpo_mp.utils.files import sync_to_disk

SHARD_BYTES = 2**30  # of a file: a writer holds one that is written and one that is filled, and the tensor after them
# What goes with the weights, by kind. Everything else stays behind: weights in other formats, adapters, what a trainer
# or a checkpoint keeps.
AUX_FILES = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("*.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("*.py", "*.md", "LICENSE*", "NOTICE*"),
)
QUANTIZATION_CONFIG = "quantization_config"
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


@dataclass(frozen=True)
class Shard:
    """One file of weights that is not yet numbered: its tensors' names and their bytes."""

    file: str
    names: tuple[str, ...]
    nbytes: int


def begin_hf(folder: Path) -> None:
    """Make the folder that shards are written to until they are complete."""
    incomplete = incomplete_folder(folder)
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], writer: int, shard_bytes: int = SHARD_BYTES
) -> list[Shard]:
    """Write one writer's tensors; several may write at the same time.

    While one shard is written, `tensors` makes the next: at most two shards and one tensor are in memory.
    """
    shards: list[Shard] = []
    with ThreadPoolExecutor(1, thread_name_prefix="export") as pool:
        writing: Future[Shard] | None = None
        for number, tensors_by_name in enumerate(_split_by_bytes(tensors, shard_bytes)):
            if writing:
                shards.append(writing.result())
            writing = pool.submit(_write_shard, folder, f"shard-{writer}-{number}", tensors_by_name)
        if writing:
            shards.append(writing.result())
    return shards


def _write_shard(folder: Path, file: str, tensors: dict[str, torch.Tensor]) -> Shard:
    path = incomplete_folder(folder) / file
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # is no OSError
        raise OSError(f"{file}: {error}") from error
    sync_to_disk(path)  # by who wrote it, whose machine has it in memory
    shard = Shard(file, tuple(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    tensors.clear()
    return shard


def complete_hf(folder: Path, shards: Sequence[Shard], like: Path, fp8: bool = False) -> None:
    """Rename the shards of all writers, write the index, copy the other files of `like`, and rename the folder."""
    incomplete = incomplete_folder(folder)
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = shard_name(index + 1, len(shards))
        (incomplete / shard.file).rename(incomplete / file)
        weight_map |= dict.fromkeys(shard.names, file)
    if len(shards) != 1:
        write_index(incomplete, weight_map, sum(shard.nbytes for shard in shards))
    copy_aux_files(like, incomplete, fp8)
    for other in set(incomplete.rglob("*")) - {incomplete / name for name in weight_map.values()}:
        sync_to_disk(other)
    sync_to_disk(incomplete)
    replace_folder(incomplete, folder)


def replace_folder(complete: Path, folder: Path) -> None:
    """Rename a complete folder to `folder`; the former one of this name stays whole until then."""
    former = folder.with_name(folder.name + ".former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    complete.rename(folder)
    sync_to_disk(folder.parent)
    shutil.rmtree(former, ignore_errors=True)


def incomplete_folder(folder: Path) -> Path:
    """Return where the shards of a folder are until it is complete."""
    return folder.with_name(folder.name + ".incomplete")


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
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def copy_aux_files(like: Path, folder: Path, fp8: bool = False) -> None:
    """Copy config, tokenizer, chat templates, code and licence of a folder.

    config.json then says whether the weights are blockwise FP8, and has the names of transformers 4 beside those of 5.
    """
    for file in (file for pattern in AUX_FILES for file in like.glob(pattern) if file.is_file()):
        copy = folder / file.relative_to(like)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(file, copy)
    config_file = folder / "config.json"
    if not config_file.is_file():
        return
    original: dict[str, Any] = json.loads(config_file.read_text())
    config = add_transformers_4_names(original)
    if fp8 != (QUANTIZATION_CONFIG in config):
        config.pop(QUANTIZATION_CONFIG, None)
        config |= {QUANTIZATION_CONFIG: FP8_CONFIG} if fp8 else {}
    if config != original:
        config_file.write_text(json.dumps(config, indent=2))
