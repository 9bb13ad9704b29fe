"""The safetensors files of a Hugging Face folder: read any slice, write shards of bounded size."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_mp.errors import UserError

INDEX = "model.safetensors.index.json"


class HfReader:
    """Reads tensors, or one slice of them, from a folder; only the bytes asked for are touched."""

    def __init__(self, folder: Path) -> None:
        """Open every shard. Raises UserError for a missing or torn file."""
        self.folder = folder
        self._handles = {file: _open(file) for file in _shards(folder)}
        self._where = {name: file for file, handle in self._handles.items() for name in handle.keys()}  # noqa: SIM118

    def __enter__(self) -> "HfReader":
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._handles.clear()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        """The whole tensor, or [start, stop) along `axis` (0 or 1)."""
        piece = self._slice(name)
        if axis is None:
            return piece[:]
        return piece[start:stop] if axis == 0 else piece[:, start:stop]

    def _slice(self, name: str):  # type: ignore[no-untyped-def]
        if name not in self._where:
            raise UserError(f"{self.folder}: no file holds the tensor {name}")
        return self._handles[self._where[name]].get_slice(name)


def write_hf(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], like: Path, shard_bytes: int = 4 * 2**30
) -> None:
    """Write tensors as numbered shards with an index; everything but weights is copied from `like`.

    The result appears under its name only when it is whole.
    """
    building = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    files = _write_shards(building, tensors, shard_bytes)
    _number_shards(building, files)
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
            shutil.copy2(file, building / file.name)
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)


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
        if sum(held.nbytes for held in pending.values()) + tensor.nbytes > shard_bytes:
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


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return [folder / name for name in _indexed_files(folder / INDEX)]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise UserError(f"{folder}: neither model.safetensors nor {INDEX} is there")


def _indexed_files(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not an index of safetensors files ({error!r}): copy it again") from error


def _open(file: Path):  # type: ignore[no-untyped-def]
    if not file.is_file():
        raise UserError(f"{file} is missing: the index names it")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file} is torn or not a safetensors file ({error}): copy it again") from error
