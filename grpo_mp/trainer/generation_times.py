"""How evenly the engines generate the groups of a step. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineWork:
    """Response tokens that one engine generated for a step, and when each of its groups ended.

    `ends_s`: seconds after the step's generation began; 0 for a group that had ended before.
    """

    tokens: int
    ends_s: tuple[float, ...]


def generation_times(engines: Sequence[EngineWork]) -> dict[str, float]:
    """Return speed/slowest_engine_ratio and time/generate_tail_share of a step; empty if no group took time.

    An engine's speed is measured until its own last group ended.
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
    """Return the seconds of the slowest rank over those of the median one, the faster of two."""
    return max(seconds) / statistics.median_low(seconds)
