"""Checks of data sets at the start of a run: digests of their rows, and warnings."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash

from grpo_mp.data.cursor import Mixture


def row_bytes(text: str, columns: Mapping[str, Any]) -> bytes:
    """Return the bytes that identify a prompt: its rendered text, and its columns, which rewards receive."""
    return json.dumps([text, columns], default=str, skipkeys=True).encode()


def joined_digest(parts: Iterable[str | bytes]) -> str:
    """Return the digest of several parts in order, such as the digests of data sets."""
    joined = xxhash.xxh3_128()
    for part in parts:
        joined.update(part.encode() if isinstance(part, str) else part)
    return str(joined.hexdigest())


def left_out(setting: str, count: int, rows: int, unit: str, limit: str, outcome: str) -> Iterator[str]:
    """Yield a warning if any rows are longer than the limit. `outcome`: consequence for these rows."""
    if count:
        yield f"{setting}: {count} of {rows} {unit} are longer than {limit}, and {outcome}"


def too_few(source: str, size: int, unit: str, takes: str, smallest: str) -> str:
    """Return the message that a set cannot fill a step. `smallest`: see `smallest_set`."""
    limited = f", limited by {smallest}: give that more rows or a lower weight" if smallest else ""
    return f"{source}: {size} {unit} fit, a step takes {takes}{limited}"


def smallest_set(setting: str, names: Iterable[str], mixture: Mixture) -> str:
    """Return the size and name of the set that limits an epoch of the mixture; "" without a mixture."""
    if not mixture:
        return ""
    name, share = max(zip(names, mixture, strict=True), key=lambda pair: pair[1].count / pair[1].size)
    return f"the {share.size} of {setting}.{name}"
