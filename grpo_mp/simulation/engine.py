"""A simulated engine: the sequences that it runs, how far they are, and when the next one ends."""

import heapq
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from math import inf, sqrt

from grpo_mp.simulation.scenario import Scenario


@dataclass(eq=False)
class SimulatedGroup:
    """A group; `number` is its place in the launch order. `version`: weights of its first token."""

    number: int
    lengths: tuple[int, ...]
    kept: bool
    version: int | None = None
    tokens: dict[int, float] = field(default_factory=dict)  # of its samples that have ended, or as it was paused
    recorded: dict[int, float] = field(default_factory=dict)  # those of the last pause, which outlive its engine
    unfinished: int = 0
    needs_prompt: bool = True

    @property
    def total_tokens(self) -> float:
        """Return the tokens that the trainer has."""
        return sum(self.tokens.values())


Sequence = tuple[SimulatedGroup, int]  # a sample of a group


class EngineState(Enum):
    """How far an engine is that was lost; all but one that works take no groups."""

    WORKS = auto()
    STARTS = auto()
    STARTED = auto()  # without weights
    JOINS = auto()  # with weights, or about to get them: it works from the next step, or attempt at a step, on


class SimulatedEngine:
    """Decodes a token (times the acceptance length) of every running sequence at a time, prefill first."""

    def __init__(self, scenario: Scenario) -> None:
        """Start without work."""
        self._scenario, self._rates = scenario, scenario.rates
        self.groups: set[SimulatedGroup] = set()
        self.version_of_events = 0  # an event that was foreseen before the last change is void
        self.state, self.paused = EngineState.WORKS, False
        self.idle_s = self.generated = 0.0
        self._now = self._progress = self._cached = self._prefill_s = 0.0
        self._ends: list[tuple[float, int, Sequence]] = []  # by the progress at which they are complete
        self._waiting: deque[Sequence] = deque()
        self._order = count()

    def advance(self, now: float) -> None:
        """Let time pass, at most up to the next end."""
        seconds, self._now = now - self._now, now
        if self.paused:
            return
        prefill_s = min(self._prefill_s, seconds)
        self._prefill_s -= prefill_s
        seconds -= prefill_s
        if not self._ends:
            self.idle_s += seconds
            return
        linear, square = self._coefficients()
        tokens = 2 * seconds / (linear + sqrt(linear**2 + 4 * square * seconds))
        self._decode(min(tokens, self._ends[0][0] - self._progress))

    def next_end(self) -> float:
        """Return when the next sequence is complete, if nothing changes."""
        if self.paused or not self._ends:
            return inf
        linear, square = self._coefficients()
        tokens = self._ends[0][0] - self._progress
        return self._now + self._prefill_s + linear * tokens + square * tokens**2

    def finish_next(self) -> list[SimulatedGroup]:
        """Complete the sequences that end now; return the groups that are complete with them."""
        end, done = self._ends[0][0], list[SimulatedGroup]()
        self._decode(end - self._progress)
        while self._ends and self._ends[0][0] <= end + 1e-6:
            group, sample = heapq.heappop(self._ends)[2]
            group.tokens[sample] = group.lengths[sample]
            self._cached -= self._scenario.prompt_tokens + group.lengths[sample]
            group.unfinished -= 1
            if not group.unfinished:
                self.groups.remove(group)
                done.append(group)
        self._fill()
        return done

    def add(self, group: SimulatedGroup) -> None:
        """Begin a group, or go on with what is missing of it."""
        missing = [sample for sample, length in enumerate(group.lengths) if group.tokens.get(sample, 0) < length]
        group.unfinished, group.needs_prompt, group.recorded = len(missing), True, dict(group.tokens)
        self.groups.add(group)
        self._waiting += [(group, sample) for sample in missing]
        self._fill()

    def take_back(self, with_tokens: bool) -> list[SimulatedGroup]:
        """End all work; return the groups, in launch order, with the tokens that they have or as they were begun.

        An engine answers for a group as a whole: without tokens, those of its samples that have ended are lost, too.
        """
        for end, _, (group, sample) in self._ends:
            if with_tokens:
                group.tokens[sample] = group.lengths[sample] - (end - self._progress)
        for group in () if with_tokens else self.groups:
            group.tokens = dict(group.recorded)
        self._ends, self._prefill_s, self._cached = [], 0.0, 0.0
        self._waiting.clear()
        groups, self.groups = sorted(self.groups, key=lambda group: group.number), set()
        return groups

    def recompute_cache(self) -> None:
        """Compute the cache of all that runs once more."""
        self._prefill_s += self._cached * self._rates.prefill_token_s

    @property
    def tokens_in_flight(self) -> float:
        """Return the tokens of running sequences that the trainer has not."""
        return sum(
            group.lengths[sample] - (end - self._progress) - group.tokens.get(sample, 0.0)
            for end, _, (group, sample) in self._ends
        )

    @property
    def unrecorded_tokens(self) -> float:
        """Return the tokens that are lost with the engine: all of its groups since they were begun here."""
        ended = sum(sum(group.tokens.values()) - sum(group.recorded.values()) for group in self.groups)
        return ended + self.tokens_in_flight

    def _coefficients(self) -> tuple[float, float]:
        """Return a and b: n tokens of each running sequence take a n + b n^2 seconds, since their cache grows."""
        per_step, batch = 1 / self._scenario.acceptance_length, len(self._ends)
        square = self._rates.cached_token_s * batch / 2
        return self._rates.decode_s(batch, self._cached) * per_step, square * per_step

    def _decode(self, tokens: float) -> None:
        self._progress += tokens
        self._cached += tokens * len(self._ends)
        self.generated += tokens * len(self._ends)

    def _fill(self) -> None:
        """Start waiting sequences in the free slots."""
        while self._waiting and len(self._ends) < self._scenario.slots:
            group, sample = self._waiting.popleft()
            tokens, prompt = group.tokens.get(sample, 0.0), self._scenario.prompt_tokens
            self._prefill_s += (prompt * group.needs_prompt + tokens) * self._rates.prefill_token_s
            self._cached += prompt + tokens
            group.needs_prompt = False
            end = self._progress + group.lengths[sample] - tokens
            heapq.heappush(self._ends, (end, next(self._order), (group, sample)))
