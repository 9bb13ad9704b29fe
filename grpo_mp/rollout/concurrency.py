"""Number of groups in flight on an engine: as many as its KV cache has room for (`engine.concurrent_groups: auto`).

SGLang starts a waiting request when it expects the cache to suffice. Groups are launched while its queue is short, so
that the engine neither starves nor holds groups that another engine could start. If the cache runs full after all,
SGLang preempts requests, which later recompute their tokens: then fewer requests are in flight, and again more
while preemption is rare, as TCP does with packets (Jacobson, Congestion avoidance and control, 1988).
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

QUEUE = 0.25  # waiting requests by running ones
CUT = 0.8  # factor of the limit after preemptions
RARE = 0.02  # preemptions by requests in flight that do not lower the limit


@dataclass(frozen=True)
class EngineLoad:
    """Requests of an engine and tokens of its cache. `ended` and `preempted`: requests since the engine's start."""

    running: int
    waiting: int
    cached_tokens: int
    max_tokens: int  # capacity of the cache
    max_running: int
    at_s: float  # time.time() of the report
    ended: int = 0
    preempted: int = 0


def read_load(reply: Any) -> EngineLoad | None:
    """Return the sums over the replicas of a reply of SGLang's /v1/loads; None if it is no such reply."""
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "max_running_requests")
    try:
        rows = [[int(replica[name]) for name in names] for replica in reply["loads"]]
        at_s = max(float(replica["timestamp"]) for replica in reply["loads"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    running, waiting, cached, capacity, most = map(sum, zip(*rows, strict=True))
    return EngineLoad(running, waiting, cached, capacity, most, at_s) if min(map(min, rows)) >= 0 else None


@dataclass(frozen=True)
class Limit:
    """The limit of requests in flight, and what has been counted since it last changed or all requests ended."""

    requests: float = math.inf
    most_running: int = 0  # since the last cut
    ended: int = 0
    preempted: int = 0
    settles: bool = False  # requests from before the last cut may still report preemptions

    def after(self, load: EngineLoad, group_size: int) -> "Limit":
        """Return the limit after a report: lower if preemptions are many, else one group higher once all have ended."""
        most = max(self.most_running, load.running)
        limit = most if self.requests == math.inf else self.requests
        begun = Limit(self.requests, most, load.ended, load.preempted)
        if load.preempted - self.preempted > RARE * limit and not self.settles:
            return replace(begun, requests=max(group_size, CUT * limit), most_running=0, settles=True)
        if load.ended - self.ended < limit or not limit:
            return replace(self, most_running=most)
        reached = most > self.requests - 2 * group_size
        return replace(begun, requests=self.requests + group_size) if reached else begun

    def groups(self, load: EngineLoad, in_flight: int, group_size: int, longest: int) -> int:
        """Return how many groups may be in flight, at least 1. `in_flight`: now; `longest`: tokens of a sample."""
        fitting = min(load.max_tokens // longest, load.max_running)  # without any preemption
        if not load.running + load.waiting:
            fitting = max(fitting, self.most_running)  # a step begins with as many as ran before
        queue = QUEUE if load.waiting else 1  # an engine that has started all requests gets as many again
        queued = load.running + max(2 * group_size, queue * load.running)
        room = min(self.requests, max(fitting, queued)) - load.running - load.waiting
        return max(1, in_flight + math.floor(room / group_size))


@dataclass
class LaunchLimit:
    """Looks at one engine's load and decides how many groups may be in flight, over all steps.

    `load`: asks the engine; `longest`: most tokens of a sample; `fixed`: the number, None: auto; `unknown`: the number
    while the load is unknown.
    """

    load: Callable[[], Awaitable[EngineLoad | None]]
    longest: int
    fixed: int | None
    unknown: int
    _limit: Limit = field(default_factory=Limit, init=False)
    _looks: list[tuple[float, ...]] = field(default_factory=list, init=False)
    _preempted: list[int] = field(default_factory=lambda: [0], init=False)  # at the last metrics, and at each look

    async def look(self, in_flight: int, group_size: int) -> int:
        """Return how many groups may be in flight now; see Limit.groups."""
        load = await self.load()
        if load is None:
            return self.fixed or self.unknown
        self._limit = self._limit.after(load, group_size)
        self._looks.append((in_flight, load.waiting, load.cached_tokens / max(1, load.max_tokens)))
        self._preempted.append(load.preempted)
        return self.fixed or self._limit.groups(load, in_flight, group_size, self.longest)

    def take_metrics(self) -> dict[str, float]:
        """Return the means of the looks since the last call, and the preemptions; {} without a look."""
        if not self._looks:
            return {}
        in_flight, waiting, used = map(fmean, zip(*self._looks, strict=True))
        preempted = self._preempted[-1] - self._preempted[0]
        self._looks = []
        self._preempted = self._preempted[-1:]
        return {
            "engine/groups_in_flight": in_flight,
            "engine/waiting_requests": waiting,
            "engine/cache_use": used,
            "engine/preemptions": float(preempted),
        }
