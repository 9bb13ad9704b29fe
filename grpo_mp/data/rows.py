"""Read data rows from JSON, Parquet or `datasets`, each with its location for error messages."""

import codecs
import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from grpo_mp.config.registries import DATA_SOURCES
from grpo_mp.utils.errors import UserError, refuse_failures
from grpo_mp.utils.reading import check_regular, parse_json

Columns = dict[str, Any]


class DataSource(Protocol):
    """Reads the rows of a data set, each a dictionary of columns.

    `name`: value of `data.train`, or path of an eval set. Every rank reads the same rows in the same order. A sequence
    is read by index when a row is needed, and may be larger than memory. Any other iterable, such as a generator or an
    IterableDataset, is read once and kept in memory.
    """

    def __call__(self, name: str, /) -> Iterable[Columns]:
        """Yield the rows, or return a sequence of them."""


@dataclass(frozen=True)
class Row:
    """One row of a data set, with its location."""

    location: str  # file and line, for errors
    columns: Columns


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """Rows of a data set, read on access."""

    name: str
    unit: str  # line or row
    columns: Sequence[Columns]

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):  # a user's source may not raise IndexError
            raise IndexError(index)
        return Row(f"{self.name}, {self.unit} {index + 1}", self.columns[index])


def read_rows(name: str, source: str | None = None) -> Rows:
    """Open the rows of a data set. `source`: name of its reader; None: by the suffix of the file.

    Readers of jsonl and parquet take a file; the reader of datasets takes `name`, `name:split` or `name:config:split`,
    where name may be a folder; a user's own reader takes any text.
    """
    path = Path(name)
    source = source or source_of(name)
    if source in SOURCE_BY_SUFFIX.values():
        if not path.exists():
            raise UserError(f"{name}: no such file: set data.train or data.eval to an existing one")
        check_regular(path)
    read = DATA_SOURCES.resolve(source, "data.source")
    with refuse_failures(f"data.source {source!r}: reading {name!r} failed"):  # of a user's reader, pyarrow or fsspec
        found = read(name)
        is_indexed = hasattr(found, "__len__") and hasattr(found, "__getitem__")
        rows = cast(Sequence[Columns], found) if is_indexed else list(found)
    return Rows(name, "line" if isinstance(rows, JsonLines) else "row", rows)


def source_of(name: str) -> str:
    """Return the name of a data set's reader, by the suffix of the file; `datasets` for any other name."""
    found = (source for suffix, source in SOURCE_BY_SUFFIX.items() if name.lower().endswith(suffix))
    return next(found, "datasets")


class JsonLines(Sequence[Columns]):
    """Rows of a file of JSON lines, read on access; memory holds only the position of each row."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file = Path(name).open("rb")  # noqa: SIM115 - open as long as the rows are in use
        self._ends = np.fromiter(accumulate(map(len, self._file)), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        start = self._ends[index - 1] if index else 0
        end = self._ends[index]
        line = os.pread(self._file.fileno(), int(end - start), int(start))  # no seek, because threads share the file
        return _parse_line(line, f"{self._name}, line {index + 1}")


def _parse_line(line: bytes, location: str) -> Columns:
    if not line.strip():
        raise UserError(f"{location}: empty row: remove it")
    return _as_columns(parse_json(line, location, WANTED_JSON), location)


def _as_columns(value: Any, location: str) -> Columns:
    if not isinstance(value, dict):
        raise UserError(f"{location}: expected an object with columns, found {type(value).__name__}")
    return value


def read_jsonl(name: str) -> Sequence[Columns]:
    """Open a file of JSON lines; a file of one JSON array of rows is read completely."""
    with Path(name).open("rb") as file:
        texts = (line.removeprefix(codecs.BOM_UTF8).strip() for line in file)
        if not next(filter(None, texts), b"").startswith(b"["):
            return JsonLines(name)
        file.seek(0)
        rows = enumerate(parse_json(file.read(), name, WANTED_JSON), 1)
        return [_as_columns(value, f"{name}, row {number}") for number, value in rows]


def read_parquet(name: str) -> Sequence[Columns]:
    """Open a Parquet file: `datasets` converts it once into its cache, and maps the cache into memory."""
    import datasets

    datasets.disable_progress_bars()  # every rank would show its own
    # `datasets` treats a name as a glob pattern, by which set[1].parquet matches set1.parquet.
    return datasets.load_dataset("parquet", data_files=glob.escape(name), split="train")


def read_datasets(source: str) -> Sequence[Columns]:
    """Load the rows of `name`, `name:split` or `name:config:split` with the library `datasets`."""
    import datasets

    name, *rest = source.split(":")
    if len(rest) > 2 or not name.strip():
        raise UserError(f"{source!r}: write a .jsonl, .json or .parquet file, name:split or name:config:split")
    config = rest[0] if len(rest) == 2 else None
    split = (rest and rest[-1]) or "train"
    if not any((Path(name) / file).is_file() for file in ("dataset_dict.json", "dataset_info.json")):
        return datasets.load_dataset(name, config, split=split)
    loaded = datasets.load_from_disk(name)
    return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded


SOURCE_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".json"), "jsonl"),
    ".parquet": "parquet",
}
WANTED_JSON = "write one object a line, or one array of objects"  # remedy for a data file that is neither


def without_nulls(value: Any) -> Any:
    """Remove null values from messages or schemas, at all levels: Parquet gives every object all keys."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
