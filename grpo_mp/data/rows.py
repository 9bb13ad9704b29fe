"""Read data rows from JSONL, Parquet or `datasets`, each with its location for error messages."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_mp.config.registries import DATA_SOURCES
from grpo_mp.errors import UserError, one_line

Columns = dict[str, Any]


class DataSource(Protocol):
    """Yields rows, each a dictionary of columns. `name`: what `data.train`, or the path of an eval set, says.

    Every rank reads the same rows in the same order.
    """

    def __call__(self, name: str, /) -> Iterable[Columns]:
        """Yield the rows."""


@dataclass(frozen=True)
class Row:
    """One row as the user wrote it."""

    location: str  # file and line, for errors
    columns: Columns


def read_rows(name: str, source: str | None = None) -> Iterator[Row]:
    """Read the rows of a data set; `source`: what reads it, or None by the suffix of a file.

    jsonl, parquet: a file; datasets: a name or folder, `name`, `name:split`, `name:config:split`; or a user's own.
    Raises UserError: file or data set not found, row that is empty or no JSON object (with line number).
    """
    path, source = Path(name), source or SOURCE_BY_SUFFIX.get(Path(name).suffix, "datasets")
    if source in SOURCE_BY_SUFFIX.values() and not path.is_file():
        raise UserError(f"{name}: no such file: set data.train or data.eval to an existing one")
    read = DATA_SOURCES.resolve(source, "data.source")
    rows = read(name) if source in DATA_SOURCES.built_in else _rows_of_user(read, name, f"data.source {source!r}")
    unit = "line" if read is read_jsonl else "row"
    for number, columns in enumerate(rows, start=1):
        yield Row(f"{name}, {unit} {number}", columns)


def _rows_of_user(read: DataSource, name: str, label: str) -> Iterator[Columns]:
    """Yield a user's rows. Raises UserError where the function fails, or gives something else than rows."""
    try:
        for columns in read(name):
            if not isinstance(columns, dict):
                raise TypeError(f"a row is a dictionary of columns, this is a {type(columns).__name__}")
            yield columns
    except Exception as error:
        raise UserError(f"{label}: reading {name!r} failed: {type(error).__name__}: {one_line(error)}") from error


def read_jsonl(name: str) -> Iterator[Columns]:
    """Yield the rows of a file of JSON lines."""
    with Path(name).open("rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{name}, line {number}"
            if not line.strip():
                raise UserError(f"{location}: empty row: remove it")
            try:
                columns = json.loads(line)
            except ValueError as error:
                raise UserError(f"{location}: not valid JSON ({error}): write one object per line") from error
            if not isinstance(columns, dict):
                raise UserError(f"{location}: expected an object with columns, found {type(columns).__name__}")
            yield columns


def read_parquet(name: str) -> Iterable[Columns]:
    """Read the rows of a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(name).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{name}: not readable as Parquet: {one_line(error)}") from error


def read_datasets(source: str) -> Iterable[Columns]:
    """Load the rows of `name`, `name:split` or `name:config:split` by the library `datasets`."""
    import datasets

    name, *rest = source.split(":")
    if len(rest) > 2 or not name:
        raise UserError(f"{source!r}: write a .jsonl or .parquet file, name:split or name:config:split")
    config, split = rest[0] if len(rest) == 2 else None, (rest and rest[-1]) or "train"
    try:
        if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(name, config, split=split)
    except (ValueError, KeyError, OSError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source}: no such file, and `datasets` cannot load it: {one_line(error)}: "
            "give an existing file or name:split"
        ) from error


SOURCE_BY_SUFFIX = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
