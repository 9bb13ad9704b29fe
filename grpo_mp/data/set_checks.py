"""What a start finds in sets of data: a digest of the rows, and warnings."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash

from grpo_mp.data.cursor import Mixture


def row_bytes(text: str, columns: Mapping[str, Any]) -> bytes:
    """Return what identifies a prompt: what the template made of a row, and its columns, which rewards are given."""
    return json.dumps([text, columns], default=str, skipkeys=True).encode()


def joined_digest(parts: Iterable[str | bytes]) -> str:
    """Return the digest of several parts in their order, such as data sets."""
    joined = xxhash.xxh3_128()
    for part in parts:
        joined.update(part.encode() if isinstance(part, str) else part)
    return str(joined.hexdigest())


def left_out(setting: str, count: int, rows: int, unit: str, limit: str, outcome: str) -> Iterator[str]:
    """Warn of rows that are longer than a limit, if there are any. `outcome`: what becomes of them."""
    if count:
        yield f"{setting}: {count} of {rows} {unit} are longer than {limit}, and {outcome}"


def too_few(source: str, size: int, unit: str, takes: str, smallest: str) -> str:
    """Return why a step cannot be filled. `smallest`: the set that limits an epoch of a mixture; "": no mixture."""
    limited = f", limited by {smallest}: give that more rows or a lower weight" if smallest else ""
    return f"{source}: {size} {unit} fit, a step takes {takes}{limited}"


def smallest_set(setting: str, names: Iterable[str], mixture: Mixture) -> str:
    """Return which set of a mixture limits an epoch, and its size; "" where there is no mixture."""
    if not mixture:
        return ""
    name, share = max(zip(names, mixture, strict=True), key=lambda pair: pair[1].count / pair[1].size)
    return f"the {share.size} of {setting}.{name}"
