"""What failures cost that end a job: the share of a run's time that trains. Pure.

A killed job is started again, reads its newest whole checkpoint, and repeats the steps since: it trains on the groups
that they recorded (rollout/journal.py) and generates only what is missing. Failures of an engine alone end no job; they
are part of a simulated step.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from grpo_mp.utils.errors import UserError

MAX_FAILURES = 50_000
SAVE_EVERY = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class UnreliableJob:
    """A job in seconds. Failures of each kind come at random, independently of each other and of the past.

    They also come while the job waits for a host or starts again: then it starts anew, and waits for all its hosts.

    `generate_s`, `train_s`: a step's generation, and the rest, which alone a repeated step takes again; `in_flight_s`:
    of generation, what is not recorded yet when the job ends; `save_s`: of a checkpoint, while the job waits;
    `write_s`: from then until it is whole; `restart_s`: from a failure until the job is where its checkpoint is;
    `mtbf_s`: mean time between failures of the whole job, by kind; `repaired`: by kind, the share of failures after
    which a host is away for `repair_s`; `spares`: hosts that take its place. `steps`, `least_failures`: to be
    played, both or more.
    """

    generate_s: float
    train_s: float
    in_flight_s: float = 0.0
    save_s: float = 0.0
    write_s: float = 0.0
    restart_s: float = 0.0
    mtbf_s: Mapping[str, float] = field(default_factory=dict)
    repaired: Mapping[str, float] = field(default_factory=dict)
    spares: int = 0
    repair_s: float = 0.0
    save_every: int = 20
    steps: int = 20_000
    least_failures: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UserError for what no job can do."""
        if self.save_every < 1:
            raise UserError(
                "failures: a job without checkpoints begins anew each time: set run.save_every to 1 or more"
            )

    @property
    def step_s(self) -> float:
        """Return the seconds of an undisturbed step."""
        return self.generate_s + self.train_s


@dataclass
class FailureCost:
    """Where the seconds of a run went. `lost`: by what they were lost to; `failures`: by kind."""

    job: UnreliableJob
    total_s: float = 0.0
    lost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def effective_share(self) -> float:
        """Return the share of the time in which steps were done that counted."""
        return 1 - sum(self.lost.values()) / self.total_s


class _Hosts:
    """Spares, and the hosts that are being repaired."""

    def __init__(self, spares: int, repair_s: float) -> None:
        self._spares, self._repair_s = spares, repair_s
        self._back: deque[float] = deque()  # when they are back: in the order in which they failed

    def lose_at(self, now: float) -> None:
        """Take a host away that fails now, until it is repaired."""
        self._back.append(now + self._repair_s)

    def complete_at(self, now: float) -> float:
        """Return the moment from which the job has all its hosts, if no other fails: now, or when enough are back."""
        while self._back and self._back[0] <= now:
            self._back.popleft()
        missing = len(self._back) - self._spares
        return now if missing <= 0 else self._back[missing - 1]


class _Failures:
    """The failures of a job, one after the other."""

    def __init__(self, job: UnreliableJob) -> None:
        self._job, self._random = job, Random(f"job failures {job.seed}")
        self._rates = {kind: 1 / mean_s for kind, mean_s in job.mtbf_s.items() if mean_s}
        self._hosts = _Hosts(job.spares, job.repair_s)
        self.next_at = self._draw_next(0.0)

    def start_again(self, cost: FailureCost) -> float:
        """Play from the next failure until the job is where its checkpoint is, and return that moment.

        A failure before that makes it start anew. Raises UserError where it never gets there.
        """
        while True:
            now = self.next_at
            (kind,) = self._random.choices(list(self._rates), weights=list(self._rates.values()))
            cost.failures[kind] += 1
            if cost.failures.total() > MAX_FAILURES:
                every_s = 1 / sum(self._rates.values())
                raise UserError(f"a job that fails every {every_s:,.3g} s never ends: {_advice(cost)}")
            if self._random.random() < self._job.repaired.get(kind, 0.0):
                self._hosts.lose_at(now)
            starts_at = self._hosts.complete_at(now)
            self.next_at = self._draw_next(now)
            cost.lost["waiting for a host"] += min(starts_at, self.next_at) - now
            cost.lost["restarts"] += min(max(0.0, self.next_at - starts_at), self._job.restart_s)
            if starts_at + self._job.restart_s <= self.next_at:
                return starts_at + self._job.restart_s

    def _draw_next(self, now: float) -> float:
        return now + self._random.expovariate(sum(self._rates.values())) if self._rates else inf


def _advice(cost: FailureCost) -> str:
    """Return what would help a run that comes nowhere, by what takes most of its time."""
    lost = max(cost.lost, key=cost.lost.__getitem__)
    advice = {
        "waiting for a host": f"repairs take {cost.job.repair_s:,.0f} s, have more spares",
        "restarts": f"it takes {cost.job.restart_s:,.0f} s to start again, which has to be faster",
    }
    return advice.get(lost, "save more often")


def _undisturbed_saves(job: UnreliableJob, left_s: float, steps: float) -> int:
    """Return how many checkpoints a job that has just saved writes before the failure in `left_s`, all of them whole.

    At most, those of so many steps.
    """
    cycle_s = job.save_every * job.step_s + job.save_s
    return int(max(0.0, min((left_s - job.write_s) / cycle_s - 1, steps // job.save_every)))


def play_failures(job: UnreliableJob) -> FailureCost:
    """Play a run until all its steps are done. Raises UserError where it fails too often to get there."""
    cost, failures = FailureCost(job), _Failures(job)
    now, done, generated = 0.0, 0, 0.0  # generated: steps, and the recorded part of the one that is not done
    checkpoints = [(0, 0.0)]  # step, and when it is whole
    least_failures = job.least_failures if failures.next_at < inf else 0
    steps = inf if least_failures else job.steps  # as long as too few failures came, no number of steps is enough
    while done < steps:
        # rare failures come after many steps that are alike: these are not played one by one
        is_fresh = generated == done == checkpoints[-1][0]
        if is_fresh and (saves := _undisturbed_saves(job, failures.next_at - now, steps - done)):
            now += saves * (job.save_every * job.step_s + job.save_s)
            generated = done = done + saves * job.save_every
            cost.lost["saves"] += saves * job.save_s
            checkpoints.append((done, now + job.write_s))
            continue
        generate_s = job.generate_s * min(1.0, 1.0 - min(1.0, generated - done))
        is_saved = (done + 1) % job.save_every == 0
        end = now + generate_s + job.train_s + job.save_s * is_saved
        fails_at = failures.next_at
        if end <= fails_at:
            now, done = end, done + 1
            generated = max(generated, done)
            cost.lost["saves"] += job.save_s * is_saved
            if is_saved:
                checkpoints.append((done, now + job.write_s))
            continue
        recorded_s = min(max(0.0, fails_at - now - job.in_flight_s), generate_s)
        cost.lost["repeated"] += fails_at - now - recorded_s
        generated = max(generated, done) + (recorded_s / job.generate_s if recorded_s else 0.0)
        checkpoints = [max(item for item in checkpoints if item[1] <= fails_at)]
        cost.lost["repeated"] += (done - checkpoints[0][0]) * job.train_s
        done = checkpoints[0][0]
        now = failures.start_again(cost)
        steps = inf if cost.failures.total() < least_failures else job.steps
    cost.total_s = now
    return cost


def compare_save_every(job: UnreliableJob) -> list[FailureCost]:
    """Play the run with other numbers of steps between checkpoints, too."""
    return [play_failures(replace(job, save_every=every)) for every in sorted({*SAVE_EVERY, job.save_every})]
