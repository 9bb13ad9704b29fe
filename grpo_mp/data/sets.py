"""Data sets of a run: the rows of each source are checked at the start, and read again on access."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from grpo_mp.data.cursor import Mixture, mix_sets
from grpo_mp.data.rows import Row, Rows
from grpo_mp.utils.errors import UserError, did_you_mean
from grpo_mp.utils.reading import has_column, read_column, shorten

ROWS_AT_ONCE = 1024  # rows in one call of the tokenizer
Item = TypeVar("Item")
Integers = npt.NDArray[np.int64]
# Numbers, words, and signs that make another problem of the same numbers. A hyphen between words is no sign.
WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|[+*/=<>^%]|(?<![^\W\d]{2})-|-(?![^\W\d]{2})")


@dataclass(frozen=True)
class Limit:
    """Largest number of tokens of a prompt or chat, and its setting."""

    setting: str
    tokens: int
    unit: str  # plural of the items, for messages


class Measured(NamedTuple):
    """Sizes of one row, in tokens, and the values that identify the row. A row without learned tokens is left out."""

    tokens: int
    learned: int
    content: Sequence[Any]
    problem: str  # the text by which a problem is found in other data sets


@dataclass(frozen=True, eq=False)
class Part(Sequence[Item]):
    """Items of one source; memory holds only the numbers and sizes of their rows."""

    rows: Rows
    numbers: Integers  # row of each item
    sizes: Integers  # tokens and learned tokens of each item, (items, 2)
    problems: npt.NDArray[np.uint64]  # hash of each item's problem, see problem_hash
    read: Callable[[Row, int], Item]  # converts a row to the item with an index
    content: bytes  # digest of all rows
    too_long: int  # rows that were left out
    warning: str  # about the rows that were left out
    first: int = 0  # index of the first item in the data set

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> Any:
        return self.read(self.rows[int(self.numbers[place])], self.first + place)


@dataclass(frozen=True, eq=False)
class DataSet(Sequence[Item]):
    """Items of several parts, one after the other."""

    source: str
    parts: Sequence[Sequence[Item]]
    too_long: int = 0  # rows that were left out
    mixture: Mixture = ()  # share of each part in an epoch
    filtered: int = 0  # prompts that were left out by their pass rate
    digest: str = ""  # of the content of its rows
    warnings: tuple[str, ...] = ()  # shown at every start
    sizes: Integers = field(default_factory=lambda: np.zeros((0, 2), np.int64))  # see Part
    problems: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))  # see Part

    @property
    def epoch_size(self) -> int:
        return sum(share.count for share in self.mixture) or len(self)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: Any) -> Any:
        place = index
        for part in self.parts:
            if place < len(part):
                return part[place]
            place -= len(part)
        raise IndexError(index)

    def check_size(self, takes: str, count: int, unit: str, names: Iterable[str]) -> None:
        """Check that an epoch fills a step of `count` items. `takes`: setting of the count; `names`: of the parts."""
        if self.epoch_size >= count:
            return
        limited = ""
        if self.mixture:
            name, share = max(zip(names, self.mixture, strict=True), key=lambda pair: pair[1].count / pair[1].size)
            limited = f", limited by the {share.size} of data.train.{name}: give that more rows or a lower weight"
        raise UserError(f"{self.source}: {self.epoch_size} {unit} fit, a step takes {takes}={count}{limited}")


def read_part(
    rows: Rows,
    measure: Callable[[Sequence[Row]], Iterable[Measured]],
    read: Callable[[Row, int], Item],
    limit: Limit,
    count: int | None = None,
) -> Part[Item]:
    """Check and measure all rows, or the first `count`; keep those within the limit, which are never cut."""
    if not len(rows):
        raise UserError(f"{rows.name}: no rows: give a file with at least one row")
    end = min(len(rows), count or len(rows))
    content = xxhash.xxh3_128()
    found = list[tuple[int, int]]()
    problems = list[int]()
    for start in range(0, end, ROWS_AT_ONCE):
        for row in measure([rows[number] for number in range(start, min(start + ROWS_AT_ONCE, end))]):
            found.append((row.tokens, row.learned))
            problems.append(problem_hash(row.problem))
            content.update(json.dumps(row.content, default=str, skipkeys=True).encode())
    sizes = np.array(found, np.int64)
    fits = (sizes[:, 0] <= limit.tokens) & (sizes[:, 1] > 0)
    longer = f"{limit.unit} are longer than {limit.setting}={limit.tokens}"
    if not fits.any():
        raise UserError(f"{rows.name}: all {end} {longer}: raise it")
    too_long = end - int(fits.sum())
    warning = f"{too_long} of {end} {longer}" if too_long else ""
    return Part(
        rows,
        np.flatnonzero(fits),
        sizes[fits],
        np.array(problems, np.uint64)[fits],
        read,
        content=content.digest(),
        too_long=too_long,
        warning=warning,
    )


def problem_hash(text: str) -> int:
    """Return a hash of the words, numbers and signs of a text, without regard to case, blanks and punctuation."""
    words = WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return xxhash.xxh3_64_intdigest("\0".join(words).encode())


def overlap_warnings(train: DataSet[Item], evals: Mapping[str, DataSet[Item]]) -> Iterator[str]:
    """Yield a sentence for each eval set with problems that are also in the train data, word by word."""
    for name, held_out in evals.items():
        if count := int(np.isin(held_out.problems, train.problems).sum()):
            yield f"data.eval.{name}: {count} of {len(held_out)} problems are also in data.train"


def join_parts(
    parts: Mapping[str, Part[Item]], setting: str, fate: str, weights: Sequence[float] = ()
) -> DataSet[Item]:
    """Join the parts of a data set, by name; an epoch draws them by `weights`.

    setting: of the parts, for warnings; fate: of the rows that were left out.
    """
    first = 0
    digest = xxhash.xxh3_128()
    joined = list[Part[Item]]()
    warnings = list[str]()
    for name, part in parts.items():
        joined.append(replace(part, first=first))
        first += len(part)
        digest.update(part.content + part.numbers.astype("<i8").tobytes())
        if part.warning:
            prefix = setting if name == "train" else f"{setting}.{name}"
            warnings.append(f"{prefix}: {part.warning}, and {fate}")
    return DataSet(
        ", ".join(part.rows.name for part in joined),
        joined,
        too_long=sum(part.too_long for part in joined),
        mixture=mix_sets([len(part) for part in joined], weights) if len(joined) > 1 else (),
        digest=digest.hexdigest(),
        warnings=tuple(warnings),
        sizes=np.concatenate([part.sizes for part in joined]),
        problems=np.concatenate([part.problems for part in joined]),
    )


def column_of(row: Row, name: str, remedy: str) -> Any:
    """Return a column of a row; `name` may be a path such as task.question."""
    if has_column(row.columns, name):
        return read_column(row.columns, name)
    known = shorten(", ".join(map(str, row.columns)), 300) or "none"
    hint = did_you_mean(name, row.columns)
    raise UserError(f"{row.location}: no column {name}{hint}, the row has: {known}: {remedy}")
