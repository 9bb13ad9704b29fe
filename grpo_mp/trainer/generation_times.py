"""Metrics of the balance between engines, or ranks, in a step."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineWork:
    """Response tokens that one engine generated for a step, and when each of its groups ended.

    `ends_s`: seconds after the step's generation began; 0 for a group that ended earlier.
    """

    tokens: int
    ends_s: tuple[float, ...]


def generation_times(engines: Sequence[EngineWork]) -> dict[str, float]:
    """Return two metrics of a step; empty if no group took time.

    speed/slowest_engine_ratio: lowest / median tokens per second of an engine, up to the end of its last group.
    time/generate_tail_share: share of the generation time that is left when 90 % of the groups have ended.
    """
    ends = sorted(end for engine in engines for end in engine.ends_s)
    if not ends or not ends[-1]:
        return {}
    worked = [(engine.tokens, max(engine.ends_s, default=0.0)) for engine in engines]
    speeds = [tokens / seconds for tokens, seconds in worked if seconds]
    nine_in_ten = ends[-(-9 * len(ends) // 10) - 1]
    return {
        "speed/slowest_engine_ratio": min(speeds) / statistics.median_high(speeds),
        "time/generate_tail_share": (ends[-1] - nine_in_ten) / ends[-1],
    }


def slowest_rank_ratio(seconds: Sequence[float]) -> float:
    """Return max / median of the ranks' `seconds`; with an even number of ranks, the lower median."""
    return max(seconds) / statistics.median_low(seconds)
