"""Rewards of single steps, for process supervision: what the user's function returns, checked."""

import math
from collections.abc import Sequence
from typing import Any

from grpo_mp.rewards.timeouts import RewardError
from grpo_mp.types import SampleGroup

Steps = tuple[tuple[int, float], ...]  # (index of the step's last token in the response, its reward), ascending


def validate_steps(rows: Sequence[Any], group: SampleGroup) -> list[Steps]:
    """Return one `Steps` per sample; None and an empty list are a response without steps.

    Raises RewardError: not one list per sample, no (end, reward) pairs, ends out of range or not ascending,
    a reward that is not finite.
    """
    if len(rows) != len(group.samples):
        raise RewardError(f"returned {len(rows)} lists of steps for {len(group.samples)} samples")
    return [_parse_steps(row, len(group.samples[i].tokens), i) for i, row in enumerate(rows)]


def _parse_steps(row: Any, tokens: int, sample: int) -> Steps:
    try:
        steps = tuple((_as_integer(end), float(reward)) for end, reward in (row if row is not None else ()))
    except (TypeError, ValueError) as error:
        raise RewardError(f"returned {row!r:.200} where (end token index, reward) pairs belong", sample) from error
    previous = -1
    for end, reward in steps:
        if not previous < end < tokens:
            raise RewardError(
                f"returned a step that ends at token {end} after one at {previous}: ends ascend, below {tokens}", sample
            )
        if not math.isfinite(reward):
            raise RewardError(f"returned the step reward {reward}, which is not finite", sample)
        previous = end
    return steps


def _as_integer(end: Any) -> int:
    if int(end) != end:
        raise ValueError(f"{end} is no index")
    return int(end)
