"""A digest of the rows that a run learns from, by which a start finds that they have changed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


class RowsDigest:
    """The digest of rows in their order."""

    def __init__(self) -> None:
        """Begin with no row."""
        self._hash = xxhash.xxh3_128()

    def add(self, text: str, columns: Mapping[str, Any]) -> None:
        """Add a prompt: what the template made of a row, and its columns, which rewards are given."""
        self._hash.update(_row_bytes(text, columns))

    def add_tokens(self, tokens: Sequence[int], learned: npt.NDArray[np.bool_]) -> None:
        """Add a chat, of which these tokens are learned."""
        self._hash.update(np.array([len(tokens), *tokens], dtype="<i8").tobytes() + learned.tobytes())

    def of(self, numbers: npt.NDArray[np.int64]) -> str:
        """Return the digest of the rows so far, of which those with these numbers are taken."""
        taken = self._hash.copy()
        taken.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
        return str(taken.hexdigest())


def row_key(text: str, columns: Mapping[str, Any]) -> int:
    """Return a number of 64 bits by which a row with this text and these columns is known."""
    return int(xxhash.xxh3_64_intdigest(_row_bytes(text, columns)))


def _row_bytes(text: str, columns: Mapping[str, Any]) -> bytes:
    return json.dumps([text, columns], default=_plain, skipkeys=True).encode(errors="surrogatepass")


def joined_digest(parts: Iterable[str]) -> str:
    """Return the digest of several data sets, in their order."""
    return str(xxhash.xxh3_128(" ".join(parts).encode()).hexdigest())


def _plain(value: Any) -> Any:
    """Return what JSON can say of a value; of one that is unknown only its type: how it is shown may change."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | time | timedelta | Decimal | Fraction):
        return str(value)
    return type(value).__qualname__
