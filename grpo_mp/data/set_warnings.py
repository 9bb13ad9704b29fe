"""What a start says of a set of data: what is left out, what is there many times, what the template does not show."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from grpo_mp.data.cursor import Mixture

COPIES_SHARE = 0.05  # of the rows: fewer copies are an accident of large sets that changes nothing


def left_out(setting: str, count: int, rows: int, unit: str, limit: str, outcome: str) -> Iterator[str]:
    """Warn of rows that are longer than a limit, if there are any. `outcome`: what becomes of them."""
    if count:
        yield f"{setting}: {count} of {rows} {unit} are longer than {limit}, and {outcome}"


def copies(setting: str, keys: npt.NDArray[np.uint64], remedy: str) -> Iterator[str]:
    """Warn of a set with copies; rows with the same of `keys` are copies."""
    counts = np.unique(keys, return_counts=True)[1]
    if len(keys) - len(counts) > COPIES_SHARE * len(keys):
        yield (
            f"{setting}: its {len(keys)} prompts are {len(counts)} distinct ones, with up to {counts.max()} copies "
            f"each; {remedy}"
        )


def dropped_system(setting: str) -> str:
    """Warn of a template that leaves out system messages."""
    return (
        f"{setting}: the chat template leaves out system messages, such as data.system_prompt: write into the prompts "
        "what they say, or use another template"
    )


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
