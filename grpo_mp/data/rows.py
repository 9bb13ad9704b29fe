"""Read data rows from JSONL, Parquet or `datasets`, each with its location for error messages."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mp.errors import UserError

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Row:
    """One row as the user wrote it."""

    location: str  # file and line, for errors
    columns: dict[str, Any]


def read_rows(source: str) -> Iterator[Row]:
    """Read a JSONL or Parquet file, or a `datasets` name or folder: `name`, `name:split`, `name:config:split`.

    Raises UserError: file or data set not found, row that is empty or no JSON object (with line number).
    """
    path = Path(source)
    if path.suffix not in FILE_SUFFIXES:
        yield from _dataset_rows(source)
    elif not path.is_file():
        raise UserError(f"{source}: no such file: set data.train or data.eval to an existing one")
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        yield from _json_rows(path)


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}, line {number}"
            if not line.strip():
                raise UserError(f"{location}: empty row: remove it")
            yield Row(location, _json_object(line, location))


def _json_object(line: bytes, location: str) -> dict[str, Any]:
    try:
        columns = json.loads(line)
    except ValueError as error:
        raise UserError(f"{location}: not valid JSON ({error}): write one object per line") from error
    if not isinstance(columns, dict):
        raise UserError(f"{location}: expected an object with columns, found {type(columns).__name__}")
    return columns


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as Parquet: {_one_line(error)}") from error
    yield from _number_rows(table.to_pylist(), str(path))


def _dataset_rows(source: str) -> Iterator[Row]:
    name, *rest = source.split(":")
    if len(rest) > 2 or not name:
        raise UserError(f"{source!r}: write a .jsonl or .parquet file, name:split or name:config:split")
    split = rest[-1] if rest else None
    config = rest[0] if len(rest) == 2 else None
    yield from _number_rows(_load_dataset(name, config, split or "train", source), source)


def _load_dataset(name: str, config: str | None, split: str, source: str) -> Iterable[dict[str, Any]]:
    import datasets

    try:
        if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(name, config, split=split)
    except (ValueError, KeyError, OSError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source}: no such file, and `datasets` cannot load it: {_one_line(error)}: "
            "give an existing file or name:split"
        ) from error


def _number_rows(rows: Iterable[dict[str, Any]], source: str) -> Iterator[Row]:
    for number, columns in enumerate(rows, start=1):
        yield Row(f"{source}, row {number}", columns)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
