"""Play a run: groups are launched, end, are trained on; the engines' weights follow. Pure, the same for a seed."""

import copy
import heapq
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from enum import Enum, auto
from functools import lru_cache
from itertools import count, pairwise
from math import expm1, inf, log, log1p
from random import Random
from typing import TypeVar

from grpo_mp.batching.group_selection import Admission, admit
from grpo_mp.simulation.engine import EngineState, SimulatedEngine, SimulatedGroup
from grpo_mp.simulation.scenario import Outcome, Scenario, Schedule, Totals
from grpo_mp.utils.errors import UserError

MAX_FAILURES = 20_000
MAX_FAILURES_OF_LOST = 200_000  # that hit an engine while it is lost, which is quickly played
SETTLED = 0.01  # share by which a step's time differs from that of a run half as long
MOST_DOUBLINGS = 5
MOST_STEPS = 1000  # until so many failures of engines have come as are wanted
WINDOW_STEPS = 3  # that are played until a failure: in one alone, no longer one than the mean would be hit late
QUIET_STEPS = 2  # for each version of staleness: then a step is as if no engine had ever failed
FILTERED_DECK = 100  # groups of which the filter drops its share, to within one
FAILURE_DECK = 32  # gaps between failures, dealt as lengths are: their sum is what it is in the mean
GOLDEN_RATIO = 0.6180339887498949  # its multiples, less their whole parts, divide a range evenly: a step, for failures
T = TypeVar("T")


class _Event(Enum):
    SEQUENCE_ENDS = auto()
    ENGINE_FAILS = auto()
    ENGINE_HAS_STARTED = auto()
    TRAINED = auto()
    SYNCED = auto()


class _Trainer(Enum):
    """What the trainer does: wait for groups, train, or send its weights."""

    WAITS = auto()
    TRAINS = auto()
    SYNCS = auto()


@lru_cache(maxsize=64)
def simulate(scenario: Scenario) -> Outcome:
    """Play the steps of a run, event by event; what was played before is remembered, as it would be the same."""
    return _Run(scenario).play()


def simulate_until_settled(scenario: Scenario) -> Outcome:
    """Play a run of so many steps, then of twice as many, until both say nearly the same of a step's time."""
    outcome = simulate(scenario)
    for _ in range(MOST_DOUBLINGS):
        shorter, outcome = outcome, simulate(replace(scenario, steps=2 * outcome.scenario.steps))
        if abs(outcome.step_s / shorter.step_s - 1) < SETTLED:
            break
    return outcome


def _deal(deck: Sequence[T], random: Random) -> Iterator[T]:
    """Yield the items in shuffled order, again and again: few of them are as the whole."""
    shuffled = list(deck)
    while True:
        random.shuffle(shuffled)
        yield from shuffled


def _filter(drop_rate: float, random: Random) -> Iterator[bool]:
    """Yield whether groups are kept: of all decks so far the rate is dropped, to within half a group."""
    before = 0
    for decks in count(1):
        dropped = round(decks * FILTERED_DECK * drop_rate)
        deck = [number >= dropped - before for number in range(FILTERED_DECK)]
        random.shuffle(deck)
        yield from deck
        before = dropped


def _failures(scenario: Scenario) -> Iterator[tuple[float, int]]:
    """Yield the seconds from one failure to the next, of all engines, and the engine that it hits, at random.

    The gaps are the means of equal shares of an exponential distribution: from that above a share of w to none it is
    1 - log(w), the integral of -log(w) over w. An engine that is lost already is not lost again.
    """
    random, gap_s = Random(f"failures {scenario.seed}"), scenario.engine_mtbf_s / scenario.engines
    above = [number / FAILURE_DECK for number in range(FAILURE_DECK + 1)]
    sums = [share * (1 - log(share)) if share else 0.0 for share in above]
    gaps = [(high - low) * FAILURE_DECK for low, high in pairwise(sums)]
    for gap in _deal(gaps, random):
        yield gap * gap_s, random.randrange(scenario.engines)


class _Run:
    """The state between events. Each event changes it in one of the methods below."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.failures = scenario, _failures(scenario)
        self.fails_at, self.failing, self.failures_drawn = inf, 0, 0  # the next failure, its engine, and its number
        self.quiet_steps = 0  # since all engines work again
        self.phase = Random(f"phase {scenario.seed}").random()  # of a failure in its steps, where others are skipped
        self.totals, self.middle, self.ends = Totals(), Totals(), [0.0]
        self.engines = [SimulatedEngine(scenario) for _ in range(scenario.engines)]
        self.order, self.events = count(), list[tuple[float, int, _Event, int, int]]()
        self.lengths = _deal(scenario.lengths, Random(scenario.seed))
        self.kept = _filter(scenario.drop_rate, Random(f"filter {scenario.seed}"))
        self.trainer, self.trainer_busy_s, self.paused = _Trainer.WAITS, 0.0, False
        self.step, self.version, self.unsent = 0, 0, False
        self.first, self.launched = 0, 0  # numbers: of the step's first group, and of the next to be begun
        self.groups: dict[int, SimulatedGroup] = {}  # launched, not yet trained, dropped or lost
        self.verdicts: dict[int, bool] = {}  # by number, in the order in which groups ended
        self.kept_in_a_row, self.first_open = 0, 0  # groups from the step's first on; the first that has not ended
        self.interrupted: list[tuple[int, SimulatedGroup]] = []  # a heap by number: they go first
        self.free = [(0, index) for index in range(scenario.engines)]  # a heap by load; some entries are outdated
        self.admission = self._admit()

    def play(self) -> Outcome:
        """Handle events until the steps are trained."""
        self._plan_failure()
        self._launch()
        while True:
            self.totals.now, _, event, index, stamp = heapq.heappop(self.events)
            if event is _Event.SEQUENCE_ENDS:
                if stamp != self.engines[index].version_of_events:
                    continue
                self._sequence_ends(index)
            elif event is _Event.ENGINE_FAILS:
                if self.totals.now != self.fails_at or not self._engine_fails(self.failing):
                    continue
            elif event is _Event.ENGINE_HAS_STARTED:
                self.engines[index].state = EngineState.STARTED
            elif event is _Event.TRAINED:
                self._trained()
                if self._is_over():
                    middle = self.scenario.steps // 2
                    return Outcome(self.scenario, self.middle, self._count(), tuple(self.ends[middle:]))
                self._skip_quiet_steps()
            else:
                self._synced()
            self._train_or_sync()
            self._launch()
            self._interrupt_for_engines()

    # Engines

    def _sequence_ends(self, index: int) -> None:
        engine = self.engines[index]
        engine.advance(self.totals.now)
        for group in engine.finish_next():
            self._report(group)
            heapq.heappush(self.free, (len(engine.groups), index))
        self._foresee(index)

    def _engine_fails(self, index: int) -> bool:
        """Lose an engine, and return whether it was there."""
        engine = self.engines[index]
        self._plan_failure()
        if self.failures_drawn > MAX_FAILURES_OF_LOST:
            raise UserError(self._describe_endless())
        if engine.state is not EngineState.WORKS:
            return False
        engine.advance(self.totals.now)
        self.totals.tokens["lost"] += engine.unrecorded_tokens
        self.totals.failures += 1
        if self.totals.failures > MAX_FAILURES:
            raise UserError(self._describe_endless())
        for group in engine.take_back(with_tokens=False):
            self._interrupt(group)
        engine.state = EngineState.STARTS
        engine.version_of_events += 1
        self.quiet_steps = 0
        self._add_event(self.scenario.engine_restart_s, _Event.ENGINE_HAS_STARTED, index)
        return True

    def _describe_endless(self) -> str:
        return f"engines fail every {self.scenario.engine_mtbf_s:g} s, and their groups never end"

    def _any(self, state: EngineState) -> bool:
        return any(engine.state is state for engine in self.engines)

    def _let_join(self) -> None:
        """Let engines work that have started again and have weights."""
        for index, engine in enumerate(self.engines):
            if engine.state is EngineState.JOINS:
                engine.advance(self.totals.now)
                engine.state = EngineState.WORKS
                heapq.heappush(self.free, (0, index))

    def _interrupt_for_engines(self) -> None:
        """Let all engines pause where one has started again, and others have no place for what it could take.

        Those with ranks of their own do not wait for it: it joins at the next weight sync.
        """
        waits = self.interrupted or self.launched - self.first < self.admission.launch_limit
        is_generating = self.trainer is _Trainer.WAITS and not self.paused
        if self.scenario.colocated and is_generating and waits and self._any(EngineState.STARTED):
            self._halt()
            self._train_or_sync()

    def _halt(self) -> None:
        """Let the engines idle, with nothing to do, until those are there that start again."""
        self.paused = True
        for engine in self.engines:
            engine.advance(self.totals.now)
            for group in engine.take_back(with_tokens=True):
                self._interrupt(group)
            engine.version_of_events += 1

    def _interrupt(self, group: SimulatedGroup) -> None:
        heapq.heappush(self.interrupted, (group.number, group))

    def _pause(self, keep_cache: bool) -> None:
        """Let the engines stop; with `keep_cache` they hold what they run."""
        self.paused = True
        for index, engine in enumerate(self.engines):
            engine.advance(self.totals.now)
            engine.paused = True
            if not keep_cache:
                for group in engine.take_back(with_tokens=True):
                    self._interrupt(group)
            engine.version_of_events += 1
            heapq.heappush(self.free, (len(engine.groups), index))

    def _resume(self) -> None:
        self.paused = False
        for index, engine in enumerate(self.engines):
            engine.advance(self.totals.now)
            engine.paused = False
            if self.scenario.recompute_cache:
                engine.recompute_cache()
            self._foresee(index)

    # Groups

    def _launch(self) -> None:
        """Begin groups in the free places of the engines, those first that were interrupted."""
        while not self.paused and (self.interrupted or self._may_begin()):
            index = self._least_loaded()
            if index is None:
                return
            group = heapq.heappop(self.interrupted)[1] if self.interrupted else self._new_group()
            if not group.tokens:
                group.version = self.version
            engine = self.engines[index]
            engine.advance(self.totals.now)
            engine.add(group)
            heapq.heappush(self.free, (len(engine.groups), index))
            self._foresee(index)

    def _may_begin(self) -> bool:
        return self.launched - self.first < self.admission.launch_limit + self.scenario.lookahead(
            self.step - self.version
        )

    def _least_loaded(self) -> int | None:
        """Return the engine with the fewest groups, if it has a free place."""
        while self.free:
            load, index = heapq.heappop(self.free)
            if (
                self.engines[index].state is EngineState.WORKS
                and load == len(self.engines[index].groups) < self.scenario.groups_in_flight
            ):
                return index
        return None

    def _new_group(self) -> SimulatedGroup:
        lengths = tuple(next(self.lengths) for _ in range(self.scenario.group_size))
        group = self.groups[self.launched] = SimulatedGroup(self.launched, lengths, next(self.kept))
        self.launched += 1
        self.totals.groups["launched"] += 1
        return group

    def _report(self, group: SimulatedGroup) -> None:
        """Take a verdict; the rule is asked only where it may say that the step has its groups.

        Before, all that a verdict can change is how many groups may be launched: each dropped one lets one more.
        """
        self.verdicts[group.number] = group.kept
        self._count_kept_in_a_row()
        by_finish, needed = self.scenario.select_by == "finish", self.scenario.prompts_per_step
        if not self.admission.done and ((by_finish and group.kept) or self.kept_in_a_row >= needed):
            self.admission = self._admit()
        elif not group.kept:
            limit, keeps = self.admission.launch_limit, self.scenario.keeps_the_rest
            limit += (by_finish and keeps) or group.number - self.first < limit
            while not (by_finish and keeps) and not self.verdicts.get(self.first + limit - 1, True):
                limit += 1
            self.admission = replace(self.admission, launch_limit=limit)

    def _count_kept_in_a_row(self) -> None:
        while self.first_open in self.verdicts:
            self.kept_in_a_row += self.verdicts[self.first_open]
            self.first_open += 1

    def _admit(self) -> Admission:
        """Decide as the trainer does; it has no rule for taking what finished first and keeping the rest."""
        rule, first = self.scenario.admission_rule, self.first
        if self.scenario.keeps_the_rest and rule.select_by == "finish":
            kept = [number - first for number, kept in self.verdicts.items() if kept]
            wanted = len(self.groups) - (len(self.verdicts) - len(kept))  # those dropped are replaced
            limit = self.launched - first - wanted + rule.needed
            return Admission(len(kept) >= rule.needed, limit, tuple(kept[: rule.needed]), 0)
        return admit([(number - first, kept) for number, kept in self.verdicts.items()], rule)

    # The trainer

    def _train_or_sync(self) -> None:
        """Begin what the trainer does next, if it waits."""
        if self.trainer is not _Trainer.WAITS:
            return
        ready, works = self.admission.done, self._any(EngineState.WORKS)
        if self.unsent and (ready or not works or self.scenario.schedule is not Schedule.ONE_STEP_OFF):
            self._sync()
        elif ready and self.scenario.colocated and self._any(EngineState.STARTS):
            self._halt()  # before the GPUs are the trainer's, an engine has to have started
        elif ready:
            self._train()
        elif (self.paused or not works) and not self._any(EngineState.STARTS):
            if self._any(EngineState.STARTED):
                self._sync()
            else:
                self._let_join()

    def _sync(self) -> None:
        """Begin to send the weights to the engines, those that have started again, too."""
        for engine in self.engines:
            if engine.state is EngineState.STARTED:
                engine.state = EngineState.JOINS
        self._occupy_trainer(_Trainer.SYNCS, self.scenario.rates.sync_s, _Event.SYNCED)
        self._pause(keep_cache=True)

    def _train(self) -> None:
        """Take the step's groups out of the stream and train on them; the next step's stream begins."""
        if self.scenario.colocated:
            self._pause(keep_cache=False)
        else:
            self._let_join()
        tokens = self._consume()
        self._occupy_trainer(_Trainer.TRAINS, self.scenario.train_s(tokens), _Event.TRAINED)
        self.step += 1
        self.admission = self._admit()

    def _consume(self) -> float:
        """Count what becomes of the groups that the step ends; return the tokens that it trains on."""
        selected = {self.first + number for number in self.admission.selected}
        tokens = 0.0
        for number in self._ended(selected):
            group = self.groups.pop(number)
            size = sum(group.tokens.values())
            fate = "trained" if number in selected else "lost" if group.unfinished or group.kept else "dropped"
            self.totals.tokens[fate] += size
            self.totals.groups[fate] += 1
            if fate == "trained":
                assert group.version is not None
                self.totals.staleness[self.step - group.version] += self.scenario.group_size
                tokens += size + self.scenario.prompt_tokens * self.scenario.group_size
        self.interrupted = [item for item in self.interrupted if item[0] in self.groups]
        heapq.heapify(self.interrupted)
        self.verdicts = {number: kept for number, kept in self.verdicts.items() if number in self.groups}
        self.first = self.first_open = min(self.groups, default=self.launched)
        self.kept_in_a_row = 0
        self._count_kept_in_a_row()
        return tokens

    def _ended(self, selected: Set[int]) -> list[int]:
        """Return the numbers of the groups of which no later step trains on any."""
        if not self.scenario.keeps_the_rest:
            return list(self.groups)
        if self.scenario.select_by == "finish":
            return [number for number, kept in self.verdicts.items() if number in selected or not kept]
        return list(range(self.first, self.first + self.admission.consumed))

    def _is_over(self) -> bool:
        """Return whether all steps are played, and all failures with what follows from them."""
        scenario = self.scenario
        if self.step < scenario.steps or not scenario.engine_failures or self.step >= MOST_STEPS:
            return self.step >= scenario.steps
        return self.failures_drawn > scenario.engine_failures and self._is_quiet

    @property
    def _is_quiet(self) -> bool:
        return self.quiet_steps > QUIET_STEPS * self.scenario.max_staleness

    def _skip_quiet_steps(self) -> None:
        """Count steps up to the few in which an engine fails, where nothing remains of the failure before.

        How far into these it fails is distributed as without the skip: by the exponential up to their end.
        """
        window_s, left_s = WINDOW_STEPS * self.scenario.quiet_step_s, self.fails_at - self.totals.now
        if not window_s or not self._is_quiet or left_s < window_s:
            return
        self.phase = (self.phase + (1 + GOLDEN_RATIO) / WINDOW_STEPS) % 1
        gap_s = self.scenario.engine_mtbf_s / self.scenario.engines
        fails_in_s = -gap_s * log1p(self.phase * expm1(-window_s / gap_s))
        self.totals.skipped_s += left_s - fails_in_s
        self._set_failure(fails_in_s)

    def _trained(self) -> None:
        self.trainer, self.unsent = _Trainer.WAITS, True
        self.quiet_steps += 1
        if not all(engine.state is EngineState.WORKS for engine in self.engines):
            self.quiet_steps = 0
        self.ends.append(self.totals.now)
        if self.step == self.scenario.steps // 2:
            self.middle = self._count()

    def _synced(self) -> None:
        """Give the engines the weights of all steps trained so far."""
        self.trainer, self.unsent, self.version = _Trainer.WAITS, False, self.step
        self._resume()
        if self.scenario.colocated:
            self._let_join()
            if not all(engine.state is EngineState.WORKS for engine in self.engines):
                self._halt()  # a step begins with all of its engines

    # Events and sums

    def _occupy_trainer(self, trainer: _Trainer, seconds: float, end: _Event) -> None:
        self.trainer = trainer
        self.trainer_busy_s += seconds
        self._add_event(seconds, end)

    def _plan_failure(self) -> None:
        if self.scenario.engine_mtbf_s:
            seconds, self.failing = next(self.failures)
            self.failures_drawn += 1
            self._set_failure(seconds)

    def _set_failure(self, seconds: float) -> None:
        """Let an engine fail after so many seconds, and not when it was to before."""
        self.fails_at = self.totals.now + seconds
        self._add_event(seconds, _Event.ENGINE_FAILS)

    def _foresee(self, index: int) -> None:
        """Add the engine's next end to the events, in place of the one foreseen before."""
        engine = self.engines[index]
        engine.version_of_events += 1
        if (end := engine.next_end()) < inf:
            self._add_event(end - self.totals.now, _Event.SEQUENCE_ENDS, index, engine.version_of_events)

    def _add_event(self, seconds: float, event: _Event, index: int = 0, stamp: int = 0) -> None:
        heapq.heappush(self.events, (self.totals.now + seconds, next(self.order), event, index, stamp))

    def _count(self) -> Totals:
        """Return the totals as of now."""
        for engine in self.engines:
            engine.advance(self.totals.now)
        totals, scenario = copy.deepcopy(self.totals), self.scenario
        totals.generated = sum(engine.generated for engine in self.engines)
        totals.tokens["unfinished"] = sum(engine.tokens_in_flight for engine in self.engines)
        totals.tokens["unfinished"] += sum(sum(group.tokens.values()) for group in self.groups.values())
        totals.groups["unfinished"] = len(self.groups)
        totals.idle_gpu_s = sum(engine.idle_s for engine in self.engines) * scenario.engine_gpus / scenario.engines
        if not scenario.colocated:
            totals.idle_gpu_s += (totals.now - self.trainer_busy_s) * scenario.trainer_gpus
        return totals
